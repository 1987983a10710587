//! Keys of a cluster, and what each is.
use freeflow_etcd::Part;
use freeflow_orchestrator::KEY_PREFIX;
use freeflow_orchestrator::store::VALUE_BYTES_MAX;

/// Key of each part's data under its root, as [`freeflow_etcd::EtcdStore`] has them.
const DATA: &str = "data/";
pub(crate) const IDENTITY: &str = "identity";
/// Before the name of a host, beside the identity.
const DRAINED: &str = "drained/";
/// Beside the identity.
pub(crate) const RECLAIM_AFTER: &str = "reclaimAfter";
pub(crate) const RECORD: &str = "record";
pub(crate) const HOLDINGS: &str = "holdings";
pub(crate) const FOLLOWED: &str = "followed";
/// Before the number of a part.
const MEMBERS: &str = "members/";
/// Before the name of a host, among the blocks: no network has such a name.
const RECLAIMED: &str = ".reclaimed";
/// Written by each transaction of a part that has several writers, on condition that nobody else has: so they take
/// turns, and each has seen all that came before.
pub(crate) const SERIAL: &str = "serial";

/// Parts in which each host writes under its own name.
const PARTS_OF_HOSTS: [&str; 3] = ["hosts", "said", "vnics"];
/// Of one host in each of them: its values are a record, holdings, a word, and four parts of members or of
/// vNICs, each no longer than `VALUE_BYTES_MAX`.
const HOST_BYTES_MAX: usize = 8 * VALUE_BYTES_MAX;
/// Of requests and answers that are listed at once.
const REQUESTS_BYTES_MAX: usize = 16 << 20;

/// The keys of a cluster that somebody follows: each has more than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// All that hosts do something for.
    Host,
    /// Also how far each host has followed: for controllers and operators.
    Said,
    /// Also what the vNICs of each host do: for who looks at those.
    Vnics,
}

#[derive(Clone, Debug)]
pub(crate) struct Keys {
    root: String,
}

/// The meaning of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning<'a> {
    Identity,
    /// After how long a silence a host's blocks are taken back.
    ReclaimAfter,
    /// An operator has drained this host.
    Drained(&'a str),
    /// Its key in the store of declared objects.
    Declared(&'a str),
    /// Written with each change of them.
    DeclaredSerial,
    Record(&'a str),
    Holdings(&'a str),
    /// A part of what a host says of its members of networks.
    Members {
        host: &'a str,
        part: &'a str,
    },
    Followed(&'a str),
    /// A part of what a host says of its vNICs.
    Vnics {
        host: &'a str,
        part: &'a str,
    },
    Block {
        network: &'a str,
        host: &'a str,
    },
    /// All blocks and places of this host were taken back, as long as its last word is the one that the value names.
    Reclaimed(&'a str),
    /// Of the vNIC of this name.
    OfVnic(&'a str),
}

impl Keys {
    pub fn new(root: &str) -> Self {
        Self { root: root.trim_end_matches('/').to_owned() }
    }

    pub fn root(&self) -> &str {
        &self.root
    }

    /// Before all of them.
    pub fn prefix(&self) -> String {
        format!("{}/", self.root)
    }

    pub fn cluster(&self) -> String {
        format!("{}/cluster", self.root)
    }

    pub fn declared(&self) -> String {
        format!("{}/declared", self.root)
    }

    /// The part of a host that all hosts follow.
    pub fn host(&self, name: &str) -> String {
        format!("{}/hosts/{name}", self.root)
    }

    /// The part of a host that controllers and operators follow.
    pub fn said(&self, name: &str) -> String {
        format!("{}/said/{name}", self.root)
    }

    /// The part of a host that nobody follows all the time.
    pub fn vnics(&self, name: &str) -> String {
        format!("{}/vnics/{name}", self.root)
    }

    /// All parts that a host writes, that of its record first.
    pub fn of_host(&self, name: &str) -> [String; 3] {
        [self.host(name), self.said(name), self.vnics(name)]
    }

    /// A host's record, whole.
    pub fn record(&self, name: &str) -> String {
        format!("{}/{DATA}{RECORD}", self.host(name))
    }

    /// A host's holdings, whole.
    pub fn holdings(&self, name: &str) -> String {
        format!("{}/{DATA}{HOLDINGS}", self.host(name))
    }

    /// Key of a host's word, whole.
    pub fn followed_of(&self, host: &str) -> String {
        format!("{}/{DATA}{FOLLOWED}", self.said(host))
    }

    pub fn blocks(&self) -> String {
        format!("{}/blocks", self.root)
    }

    pub fn places(&self) -> String {
        format!("{}/places", self.root)
    }

    /// Requests of hosts that join, and the answers.
    pub fn requests(&self) -> String {
        format!("{}/requests", self.root)
    }

    /// The part of them that the bearer of a token has to itself.
    pub fn requests_by(&self, token: &str) -> String {
        format!("{}/{token}", self.requests())
    }

    /// Tokens, and the hosts that were admitted.
    pub fn admission(&self) -> String {
        format!("{}/admission", self.root)
    }

    /// Parts that somebody follows; who admits others follows also what is asked, as much as is answered in some time.
    ///
    /// They are followed by one watch from the first to the last of them: names of parts that few follow come after
    /// those that all hosts do, or before.
    pub fn followed(&self, scope: Scope, admits: bool) -> Vec<Part> {
        let said = (scope >= Scope::Said).then_some("said");
        let vnics = (scope >= Scope::Vnics).then_some("vnics");
        let all = ["cluster", "declared", "hosts", "blocks", "places"].into_iter().chain(said).chain(vnics);
        let part = |part: &str| {
            let prefix = format!("{}/{part}/", self.root);
            match PARTS_OF_HOSTS.contains(&part) {
                true => Part::of_writers(prefix, HOST_BYTES_MAX),
                false => Part::whole(prefix),
            }
        };
        let mut parts: Vec<Part> = all.map(part).collect();
        if admits {
            parts.push(Part::whole(format!("{}/", self.admission())));
            let prefix = format!("{}/", self.requests());
            parts.push(Part { bytes_max: REQUESTS_BYTES_MAX, may_be_cut: true, ..Part::whole(prefix) });
        }
        parts
    }

    /// `None`: something of the writers' own, such as receipts, or nobody's.
    pub fn meaning<'a>(&self, key: &'a str) -> Option<Meaning<'a>> {
        let key = key.strip_prefix(&self.root)?.strip_prefix('/')?;
        let (part, rest) = key.split_once('/')?;
        if PARTS_OF_HOSTS.contains(&part) {
            let (host, rest) = rest.split_once('/')?;
            return match (part, rest.strip_prefix(DATA)?) {
                ("hosts", RECORD) => Some(Meaning::Record(host)),
                ("hosts", HOLDINGS) => Some(Meaning::Holdings(host)),
                ("hosts", other) => other.strip_prefix(MEMBERS).map(|part| Meaning::Members { host, part }),
                ("said", FOLLOWED) => Some(Meaning::Followed(host)),
                ("vnics", part) => Some(Meaning::Vnics { host, part }),
                _ => None,
            };
        }
        let data = rest.strip_prefix(DATA)?;
        match part {
            "cluster" if data == IDENTITY => Some(Meaning::Identity),
            "cluster" if data == RECLAIM_AFTER => Some(Meaning::ReclaimAfter),
            "cluster" => data.strip_prefix(DRAINED).map(Meaning::Drained),
            "declared" if data == SERIAL => Some(Meaning::DeclaredSerial),
            "declared" if data.starts_with(KEY_PREFIX) => Some(Meaning::Declared(data)),
            "places" if data != SERIAL => Some(Meaning::OfVnic(data)),
            "blocks" => data.split_once('/').map(|of| match of {
                (RECLAIMED, host) => Meaning::Reclaimed(host),
                (network, host) => Meaning::Block { network, host },
            }),
            _ => None,
        }
    }
}

/// Of a part of what a host says of its members of networks.
pub(crate) fn members_key(part: usize) -> String {
    format!("{MEMBERS}{part}")
}

/// Of a part of what a host says of its vNICs.
pub(crate) fn vnics_key(part: usize) -> String {
    part.to_string()
}

pub(crate) fn drained_key(host: &str) -> String {
    format!("{DRAINED}{host}")
}

pub(crate) fn reclaimed_key(host: &str) -> String {
    format!("{RECLAIMED}/{host}")
}

pub(crate) fn block_key(network: &str, host: &str) -> String {
    format!("{network}/{host}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A watch has one range: what only others follow is not in that of a host.
    #[test]
    fn a_host_is_sent_nothing_that_it_does_not_follow() {
        let keys = Keys::new("/freeflow");
        let range = |scope, admits| {
            let prefixes: Vec<String> = keys.followed(scope, admits).into_iter().map(|part| part.prefix).collect();
            let part = |prefix: Option<&String>| prefix.expect("there is one")["/freeflow/".len()..].to_owned();
            (part(prefixes.iter().min()), part(prefixes.iter().max()))
        };
        let of = |first: &str, last: &str| (first.to_owned(), last.to_owned());
        assert_eq!(range(Scope::Host, false), of("blocks/", "places/"));
        assert_eq!(range(Scope::Said, false), of("blocks/", "said/"));
        assert_eq!(range(Scope::Said, true), of("admission/", "said/"));
        assert_eq!(range(Scope::Vnics, false), of("blocks/", "vnics/"));
    }

    /// Nobody but an operator, or a controller, can keep hosts from reading the rest.
    #[test]
    fn what_hosts_write_is_bounded_for_each_of_them() {
        let parts = Keys::new("/freeflow").followed(Scope::Vnics, true);
        let bounded = |part: &&Part| part.writer_bytes_max.is_some() || part.may_be_cut;
        let names = parts.iter().filter(bounded).map(|part| part.prefix["/freeflow/".len()..].trim_end_matches('/'));
        assert_eq!(names.collect::<Vec<_>>(), ["hosts", "said", "vnics", "requests"]);
    }

    #[test]
    fn each_key_has_its_meaning() {
        let keys = Keys::new("/freeflow/");
        assert_eq!((keys.root(), keys.prefix().as_str()), ("/freeflow", "/freeflow/"));
        assert_eq!(keys.meaning(&keys.record("h1")), Some(Meaning::Record("h1")));
        assert_eq!(keys.meaning(&keys.holdings("h1")), Some(Meaning::Holdings("h1")));
        assert_eq!(keys.meaning(&keys.followed_of("h1")), Some(Meaning::Followed("h1")));
        let declared = format!("{}/data/{KEY_PREFIX}networks/red", keys.declared());
        let object = format!("{KEY_PREFIX}networks/red");
        for (key, place) in [
            ("/freeflow/cluster/data/identity", Some(Meaning::Identity)),
            ("/freeflow/cluster/data/reclaimAfter", Some(Meaning::ReclaimAfter)),
            ("/freeflow/cluster/data/drained/h1", Some(Meaning::Drained("h1"))),
            ("/freeflow/cluster/data/other", None),
            (&declared, Some(Meaning::Declared(&object))),
            ("/freeflow/declared/data/serial", Some(Meaning::DeclaredSerial)),
            ("/freeflow/declared/receipts/1/2", None),
            ("/freeflow/hosts/h1/data/record", Some(Meaning::Record("h1"))),
            ("/freeflow/hosts/h1/data/holdings", Some(Meaning::Holdings("h1"))),
            ("/freeflow/hosts/h1/data/members/0", Some(Meaning::Members { host: "h1", part: "0" })),
            ("/freeflow/hosts/h1/data/followed", None),
            ("/freeflow/said/h1/data/followed", Some(Meaning::Followed("h1"))),
            ("/freeflow/said/h1/data/record", None),
            ("/freeflow/said/h1/receipts/x", None),
            ("/freeflow/vnics/h1/data/0", Some(Meaning::Vnics { host: "h1", part: "0" })),
            ("/freeflow/vnics/h1/receipts/0", None),
            ("/freeflow/hosts/h1/data/other", None),
            ("/freeflow/hosts/h1/receipts/x", None),
            ("/freeflow/blocks/data/red/h1", Some(Meaning::Block { network: "red", host: "h1" })),
            ("/freeflow/blocks/data/serial", None),
            ("/freeflow/blocks/data/.reclaimed/h1", Some(Meaning::Reclaimed("h1"))),
            ("/freeflow/places/data/database", Some(Meaning::OfVnic("database"))),
            ("/freeflow/places/data/serial", None),
            ("/freeflower/cluster/data/identity", None),
            ("/freeflow", None),
        ] {
            assert_eq!(keys.meaning(key), place, "{key}");
        }
    }
}
