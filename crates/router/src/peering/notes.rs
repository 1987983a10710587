//! Texts about hosts in the log, and in the lists of hosts.
use super::claims::ClaimSubject;
use freeflow_protocol::version::Disagreement;
use freeflow_verbs::Gid;
use std::fmt;

#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    Up {
        restarted: bool,
    },
    Down(Why),
    /// The router does without a host of the file.
    LeftOut(Why),
    Claimed {
        subject: ClaimSubject,
        refusal: &'static str,
    },
    RefusedCm {
        from: Gid,
        to: Gid,
        network: String,
    },
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Ended,
    Replaced,
    Silent,
    NotGreeted,
    Disagreed(Disagreement),
    OtherName,
    /// One of the two is sealed, the other one plain.
    Seal {
        here: bool,
    },
    Nonsense,
    Removed,
    Stuck,
    /// Too many hosts have been in the file.
    NoNumber,
    /// The kernel gave no socket, or no way.
    NotDialed {
        errno: i32,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up { restarted: false } => f.write_str("connected"),
            Self::Up { restarted: true } => f.write_str("connected; it is another run of that router"),
            Self::LeftOut(why) => write!(f, "{why}"),
            Self::Down(why) => write!(f, "connection ended: {why}"),
            Self::RefusedCm { from, to, network } => {
                write!(f, "connection management refused: from {from} to {to} in network {network:?}")
            }
            Self::Claimed { subject, refusal } => write!(f, "announced {subject}, refused: {refusal}"),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("by the other side or the network"),
            Self::Replaced => f.write_str("the host has connected again"),
            Self::Silent => f.write_str("nothing came for too long"),
            Self::NotGreeted => f.write_str("a message before Hello"),
            Self::Disagreed(why) => write!(f, "the routers are of different releases: {why}"),
            Self::OtherName => f.write_str("the other router says that it has another name"),
            Self::Seal { here: true } => f.write_str(
                "its packets would be plain and this host's are sealed (\"wire\" in both peers files; or it is of an older \
                 release)",
            ),
            Self::Seal { here: false } => f.write_str(
                "its packets are sealed and this host's would be plain (\"wire\" in both peers files)",
            ),
            Self::Nonsense => f.write_str("a message that makes no sense"),
            Self::Removed => f.write_str("the peers file was changed"),
            Self::Stuck => f.write_str("the other side takes nothing"),
            Self::NoNumber => f.write_str(
                "it is left out until the peers file is read again, since hosts that are there, or left within the last \
                 hour, have all 32767 numbers",
            ),
            Self::NotDialed { errno } => {
                write!(f, "no other could be begun: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}
