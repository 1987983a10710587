//! The router's admin socket, seen from this command.

use crate::failure::{Context, Failure, Result};
use crate::record::Record;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::{
    AdminErrorCode, AdminReply, AdminRequest, CmPage, DataPath, NetworkStatus, PeersStatus, QpStatus, RouterStatus,
    VnicStatus, WireFaults, WireStatus,
};
use freeflow_protocol::{PROTOCOL, decode, encode};
use freeflow_shm::fd::{connect_seqpacket, receive_message, send_message};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// How long a router may take to answer before it counts as stuck.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a running router of our protocol version.
#[derive(Debug)]
pub struct Admin {
    socket: OwnedFd,
    pub version: String,
    pub pid: u32,
}

/// What there is at the admin socket.
#[derive(Debug)]
pub enum Presence {
    Running(Admin),
    /// No socket, or nobody listens there.
    Absent,
    /// Somebody accepts connections and does not answer; or it speaks another version.
    Unusable(Failure),
}

impl Admin {
    pub fn connect(run_dir: &RunDir) -> Result<Self> {
        match Self::look(run_dir) {
            Presence::Running(admin) => Ok(admin),
            Presence::Absent => Err(Failure::new(format!(
                "no router is running in {}; bring the host up with: freeflow{} up",
                run_dir.path().display(),
                run_dir.option()
            ))),
            Presence::Unusable(failure) => Err(failure),
        }
    }

    pub fn look(run_dir: &RunDir) -> Presence {
        let path = run_dir.admin_socket();
        let socket = match connect_seqpacket(&path) {
            Ok(socket) => socket,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Presence::Absent;
            }
            Err(error) => return Presence::Unusable(Failure::new(format!("{}: {error}", path.display()))),
        };
        match Self::greet(socket) {
            Ok(admin) => Presence::Running(admin),
            Err(failure) => Presence::Unusable(failure),
        }
    }

    fn greet(socket: OwnedFd) -> Result<Self> {
        for direction in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(&socket, direction, Some(REPLY_TIMEOUT))
                .context("admin socket")?;
        }
        let mut admin = Self { socket, version: String::new(), pid: 0 };
        match admin.ask(&AdminRequest::Hello { protocol: PROTOCOL })? {
            AdminReply::Version { protocol, version, pid } => match PROTOCOL.agree(&protocol) {
                Ok(_) => Ok(Self { version, pid, ..admin }),
                Err(why) => Err(Failure::new(format!(
                    "the router is of another version ({version}; {why}); end it with its own freeflow command and bring \
                     the host up again"
                ))),
            },
            other => Err(unexpected(&other)),
        }
    }

    fn ask(&mut self, request: &AdminRequest) -> Result<AdminReply> {
        let what = "the router does not answer on its admin socket; see its log, or restart it with freeflow up";
        send_message(self.socket.as_fd(), &encode(request), &[]).context(what)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<AdminReply> {
        let what = "the router does not answer on its admin socket; see its log, or restart it with freeflow up";
        let mut bytes = Vec::new();
        let (length, _) = receive_message(self.socket.as_fd(), &mut bytes, 0).context(what)?;
        if length == 0 {
            crate::fail!("the router closed the admin socket; see its log, or restart it with freeflow up");
        }
        match decode(&bytes[..length]).context("the router's reply")? {
            AdminReply::Failed { code, message } => Err(refusal(code, &message)),
            reply => Ok(reply),
        }
    }

    pub fn status(&mut self) -> Result<RouterStatus> {
        match self.ask(&AdminRequest::Status)? {
            AdminReply::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    pub fn attach(
        &mut self,
        id: &str,
        name: &str,
        network: &str,
        address: Option<IpAddr>,
        labels: Vec<(String, String)>,
    ) -> Result<VnicStatus> {
        let request =
            AdminRequest::Attach { id: id.into(), name: name.into(), network: network.into(), address, labels };
        match self.ask(&request)? {
            AdminReply::Vnic(vnic) => Ok(vnic),
            other => Err(unexpected(&other)),
        }
    }

    pub fn detach(&mut self, id: &str) -> Result<()> {
        match self.ask(&AdminRequest::Detach { id: id.into() })? {
            AdminReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// A container has a declared vNIC, or has it no more.
    pub fn occupy(&mut self, id: &str, container: &str, occupied: bool) -> Result<()> {
        match self.ask(&AdminRequest::Occupy { id: id.into(), container: container.into(), occupied })? {
            AdminReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// A container does not have its vNIC any more: one that was declared stays, another one goes.
    pub fn leave(&mut self, record: &Record) -> Result<()> {
        if record.is_declared { self.occupy(&record.id, &record.name, false) } else { self.detach(&record.id) }
    }

    pub fn vnics(&mut self) -> Result<Vec<VnicStatus>> {
        let mut all: Vec<VnicStatus> = Vec::new();
        loop {
            let after = all.last().map(|vnic| vnic.id.clone());
            match self.ask(&AdminRequest::ListVnics { after })? {
                AdminReply::Vnics { vnics, more } => {
                    let more = more && !vnics.is_empty();
                    all.extend(vnics);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    pub fn networks(&mut self) -> Result<Vec<NetworkStatus>> {
        match self.ask(&AdminRequest::ListNetworks)? {
            AdminReply::Networks { networks } => Ok(networks),
            other => Err(unexpected(&other)),
        }
    }

    pub fn set_data_path(&mut self, network: &str, path: DataPath) -> Result<()> {
        match self.ask(&AdminRequest::SetDataPath { network: network.into(), path })? {
            AdminReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// All pages: the QPs of a vNIC, or of all.
    pub fn qps(&mut self, vnic: Option<&str>) -> Result<Vec<QpStatus>> {
        let mut all: Vec<QpStatus> = Vec::new();
        loop {
            let after_qpn = all.last().map(|qp| qp.qpn);
            match self.ask(&AdminRequest::ListQps { vnic: vnic.map(str::to_owned), after_qpn })? {
                AdminReply::Qps { qps, more } => {
                    let more = more && !qps.is_empty();
                    all.extend(qps);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// All pages.
    pub fn cm(&mut self) -> Result<CmPage> {
        let mut all = CmPage::default();
        loop {
            let after = all.ids.last().map(|id| id.position);
            let page = match self.ask(&AdminRequest::ListCm { after })? {
                AdminReply::Cm(page) => page,
                other => return Err(unexpected(&other)),
            };
            let more = page.more && !page.ids.is_empty();
            let ids = std::mem::take(&mut all.ids);
            all = CmPage { ids: ids.into_iter().chain(page.ids).collect(), ..page };
            if !more {
                return Ok(all);
            }
        }
    }

    pub fn peers(&mut self) -> Result<PeersStatus> {
        match self.ask(&AdminRequest::ListPeers)? {
            AdminReply::Peers(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    pub fn reload_peers(&mut self) -> Result<()> {
        match self.ask(&AdminRequest::ReloadPeers)? {
            AdminReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// The network of that name, or an error that names those there are.
    pub fn network(&mut self, name: &str) -> Result<NetworkStatus> {
        let networks = self.networks()?;
        let names: Vec<String> = networks.iter().map(|network| network.name.clone()).collect();
        networks
            .into_iter()
            .find(|network| network.name == name)
            .ok_or_else(|| Failure::new(format!("no network is called {name:?}; there is: {}", names.join(", "))))
    }

    /// All pages.
    pub fn wire_status(&mut self) -> Result<WireStatus> {
        let mut all = WireStatus::default();
        let mut after_qpn = None;
        loop {
            let page = match self.ask(&AdminRequest::WireStatus { after_qpn })? {
                AdminReply::Wire(page) => page,
                other => return Err(unexpected(&other)),
            };
            let more = page.more_qps && !page.qps.is_empty();
            let qps = std::mem::take(&mut all.qps);
            let hosts = std::mem::take(&mut all.hosts);
            all = WireStatus {
                hosts: hosts.into_iter().chain(page.hosts).collect(),
                qps: qps.into_iter().chain(page.qps).collect(),
                ..page
            };
            if !more {
                return Ok(all);
            }
            after_qpn = all.qps.last().map(|qp| qp.qpn);
        }
    }

    pub fn set_wire_faults(&mut self, faults: Option<WireFaults>) -> Result<()> {
        match self.ask(&AdminRequest::SetWireFaults { faults })? {
            AdminReply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Packets come out of the other end of `into`, until that closes; [`Self::end_capture`] then.
    pub fn begin_capture(
        &mut self,
        into: OwnedFd,
        packet_count_max: Option<u64>,
        seconds_max: Option<u64>,
    ) -> Result<()> {
        let request = AdminRequest::Capture { packet_count_max, seconds_max };
        send_message(self.socket.as_fd(), &encode(&request), &[into.as_fd()]).context("the router's admin socket")
    }

    /// How many packets there were, how many were lost, and what went wrong.
    pub fn end_capture(&mut self) -> Result<(u64, u64, Option<String>)> {
        match self.answer()? {
            AdminReply::Captured { packets, lost, error } => Ok((packets, lost, error)),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks the router to end and waits until its socket closes.
    pub fn shutdown(mut self) -> Result<()> {
        self.ask(&AdminRequest::Shutdown)?;
        let mut bytes = Vec::new();
        // The end of the connection is the answer; a reset or the timeout is as good as any.
        while matches!(receive_message(self.socket.as_fd(), &mut bytes, 0), Ok((1.., _))) {}
        Ok(())
    }
}

fn refusal(code: AdminErrorCode, message: &str) -> Failure {
    let remedy = match code {
        AdminErrorCode::Exhausted => "; end containers that are not needed (freeflow ps, freeflow rm)",
        AdminErrorCode::AlreadyExists => "; see freeflow ps -a",
        AdminErrorCode::NotPermitted => "; the admin socket is for root of this host",
        AdminErrorCode::Io => "; see router.log in the run directory",
        AdminErrorCode::Invalid | AdminErrorCode::NotFound => "",
    };
    Failure::new(format!("{message}{remedy}"))
}

fn unexpected(reply: &AdminReply) -> Failure {
    let text = format!("{reply:?}");
    let short: String = text.chars().take(80).collect();
    Failure::new(format!("the router gave an answer that does not fit the question: {short}"))
}
