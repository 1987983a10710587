//! The router, seen from this command: its admin socket, on which containers get and lose their
//! vNICs, packets are captured and the router is ended; and its REST server, for all else.

use crate::control::api::{Api, BASE, Trouble, encoded};
use crate::failure::{Context, Failure, Result, fail};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::{
    AdminErrorCode, AdminReply, AdminRequest, CmStatus, DataPath, NetworkStatus, PeersStatus, QpStatus, RouterStatus,
    VnicStatus, WireFaults, WireStatus,
};
use freeflow_protocol::{PROTOCOL, decode, encode};
use freeflow_shm::fd::{connect_seqpacket, receive_message, send_message};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a router may take to answer before it counts as stuck.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// A router that closes its socket at once, and looks dead, may be dying for so long.
const DYING_TIME: Duration = Duration::from_secs(1);
const DYING_INTERVAL: Duration = Duration::from_millis(20);
const SILENCE: &str = "the router does not answer on its admin socket; see its log, or restart it with freeflow up";

/// A connection to a running router of our protocol version.
#[derive(Debug)]
pub struct Admin {
    socket: OwnedFd,
    run_dir: RunDir,
    /// The name of the router's Host object, once it was asked for.
    host: Option<String>,
    pub version: String,
    pub pid: u32,
}

/// State of the admin socket.
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
        let (path, begin) = (run_dir.admin_socket(), Instant::now());
        loop {
            let socket = match connect_seqpacket(&path) {
                Ok(socket) => socket,
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                    return Presence::Absent;
                }
                Err(error) => return Presence::Unusable(Failure::new(format!("{}: {error}", path.display()))),
            };
            match Self::greet(run_dir, socket) {
                Ok(admin) => return Presence::Running(admin),
                // The socket of a router that was killed is there until its process is gone.
                Err(_) if begin.elapsed() < DYING_TIME => std::thread::sleep(DYING_INTERVAL),
                Err(failure) => return Presence::Unusable(failure),
            }
        }
    }

    fn greet(run_dir: &RunDir, socket: OwnedFd) -> Result<Self> {
        for direction in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(&socket, direction, Some(REPLY_TIMEOUT))
                .context("admin socket")?;
        }
        let (run_dir, version) = (run_dir.clone(), String::new());
        let mut admin = Self { socket, run_dir, host: None, version, pid: 0 };
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
        send_message(self.socket.as_fd(), &encode(request), &[]).context(SILENCE)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<AdminReply> {
        let mut bytes = Vec::new();
        let (length, _) = receive_message(self.socket.as_fd(), &mut bytes, 0).context(SILENCE)?;
        if length == 0 {
            fail!("the router closed the admin socket; see its log, or restart it with freeflow up");
        }
        match decode(&bytes[..length]).context("the router's reply")? {
            AdminReply::Failed { code, message } => Err(refusal(code, &message)),
            reply => Ok(reply),
        }
    }

    /// A client of its own for each request: nothing of it is left in a process that forks.
    fn api(&self) -> Result<Api> {
        Ok(Api::of(&self.run_dir)?.with_limit(REPLY_TIMEOUT, SILENCE))
    }

    /// Of a part of the router's Host object.
    fn host_path(&mut self, part: &str) -> Result<String> {
        let host = match &self.host {
            Some(host) => host.clone(),
            None => {
                let version = self.api()?.get("/version").map_err(refused)?;
                let host =
                    version["host"].as_str().ok_or_else(|| Failure::new("the router's answer has no host"))?.to_owned();
                self.host.insert(host).clone()
            }
        };
        Ok(format!("{BASE}/hosts/{}/{part}", encoded(&host)))
    }

    /// A field of what the REST server shows of a part of the host, and where the next page begins.
    fn read<T: DeserializeOwned>(&mut self, part: &str, field: &str, query: &str) -> Result<(T, String)> {
        let path = self.host_path(part)?;
        let mut document = self.api()?.get(&format!("{path}{query}")).map_err(refused)?;
        let value = snake_case(document[field].take());
        let next = document["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        Ok((serde_json::from_value(value).context("the router's answer")?, next))
    }

    pub fn status(&mut self) -> Result<RouterStatus> {
        Ok(self.read("router", "status", "")?.0)
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

    /// All pages.
    pub fn vnics(&mut self) -> Result<Vec<VnicStatus>> {
        self.items("vnics", "")
    }

    pub fn networks(&mut self) -> Result<Vec<NetworkStatus>> {
        self.items("networks", "")
    }

    pub fn set_data_path(&mut self, network: &str, path: DataPath) -> Result<()> {
        let path_of = format!("{BASE}/networks/{}/dataPath", encoded(network));
        self.api()?.put(&path_of, &json!({"dataPath": path})).map_err(refused)?;
        Ok(())
    }

    /// All pages: the QPs of a vNIC, or of all.
    pub fn qps(&mut self, vnic: Option<&str>) -> Result<Vec<QpStatus>> {
        self.items("qps", &vnic.map_or(String::new(), |vnic| format!("&vnic={}", encoded(vnic))))
    }

    /// All pages of a list; `parameters` go with each, each behind a `&`. A page may be empty and not the last.
    fn items<T: DeserializeOwned>(&mut self, part: &str, parameters: &str) -> Result<Vec<T>> {
        let (mut all, mut next) = (Vec::new(), String::new());
        loop {
            let query = format!("?continue={}{parameters}", encoded(&next));
            let (page, after): (Vec<T>, String) = self.read(part, "items", &query)?;
            all.extend(page);
            if after.is_empty() {
                return Ok(all);
            }
            next = after;
        }
    }

    /// All pages.
    pub fn cm(&mut self) -> Result<CmStatus> {
        let (mut all, mut next) = (CmStatus::default(), String::new());
        loop {
            let query = format!("?continue={}", encoded(&next));
            let (page, after): (CmStatus, String) = self.read("cm", "status", &query)?;
            next = if page.ids.is_empty() { String::new() } else { after };
            let ids = std::mem::take(&mut all.ids);
            all = CmStatus { ids: ids.into_iter().chain(page.ids).collect(), ..page };
            if next.is_empty() {
                return Ok(all);
            }
        }
    }

    pub fn peers(&mut self) -> Result<PeersStatus> {
        Ok(self.read("peers", "status", "")?.0)
    }

    pub fn reload_peers(&mut self) -> Result<()> {
        let path = self.host_path("peers/reload")?;
        self.api()?.post(&path, &json!({})).map_err(refused)?;
        Ok(())
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
        let (mut all, mut next) = (WireStatus::default(), String::new());
        loop {
            let query = format!("?continue={}", encoded(&next));
            let (page, after): (WireStatus, String) = self.read("wire", "status", &query)?;
            next = if page.qps.is_empty() { String::new() } else { after };
            let qps = std::mem::take(&mut all.qps);
            let hosts = std::mem::take(&mut all.hosts);
            all = WireStatus {
                hosts: hosts.into_iter().chain(page.hosts).collect(),
                qps: qps.into_iter().chain(page.qps).collect(),
                ..page
            };
            if next.is_empty() {
                return Ok(all);
            }
        }
    }

    pub fn set_wire_faults(&mut self, faults: Option<WireFaults>) -> Result<()> {
        let path = self.host_path("wire/faults")?;
        let api = self.api()?;
        match faults {
            Some(faults) => api.put(&path, &camel_case(value_of(&faults)?)).map_err(refused)?,
            None => api.delete(&path).map_err(refused)?,
        };
        Ok(())
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

/// As the same refusals of the admin socket.
fn refused(trouble: Trouble) -> Failure {
    let refusal = match trouble {
        Trouble::Refused(refusal) => refusal,
        Trouble::Failed(failure) => return failure,
    };
    let code = match refusal.reason.as_str() {
        "NotFound" => AdminErrorCode::NotFound,
        "Forbidden" => AdminErrorCode::NotPermitted,
        "Conflict" | "AlreadyExists" | "InUse" => AdminErrorCode::AlreadyExists,
        "Exhausted" => AdminErrorCode::Exhausted,
        "Internal" => AdminErrorCode::Io,
        _ => AdminErrorCode::Invalid,
    };
    self::refusal(code, &refusal.message)
}

/// The fields of a status, from the names that REST gives them.
fn snake_case(value: Value) -> Value {
    renamed(value, &|name| {
        name.chars().fold(String::new(), |mut snake, letter| {
            if letter.is_ascii_uppercase() {
                snake.push('_');
            }
            snake.push(letter.to_ascii_lowercase());
            snake
        })
    })
}

/// And back.
fn camel_case(value: Value) -> Value {
    renamed(value, &|name| {
        let mut words = name.split('_');
        let first = words.next().unwrap_or_default().to_owned();
        words.fold(first, |camel, word| {
            let (head, tail) = word.split_at(word.len().min(1));
            camel + &head.to_ascii_uppercase() + tail
        })
    })
}

fn renamed(value: Value, name_of: &impl Fn(&str) -> String) -> Value {
    match value {
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name_of(&name), renamed(value, name_of))).collect()
        }
        Value::Array(items) => items.into_iter().map(|item| renamed(item, name_of)).collect(),
        other => other,
    }
}

fn value_of(value: &impl Serialize) -> Result<Value> {
    serde_json::to_value(value).context("the request")
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

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_protocol::admin::CmCounts;

    #[test]
    fn statuses_come_back_from_their_rest_names() {
        let qp = WireFaults { seed: 1, loss_ppm: 2, delay_ns: u64::MAX, ..WireFaults::default() };
        let counts = CmCounts { half_open_count: 7, ..CmCounts::default() };
        let cm = CmStatus { counts, ..CmStatus::default() };
        let counters = vec![("rcvd_pkts".to_owned(), 5), ("sent_pkts".to_owned(), 6)];
        let wire = WireStatus { open: true, faults: Some(qp), counters, ..WireStatus::default() };
        let shown = camel_case(json!({"cm": value_of(&cm).unwrap(), "wire": value_of(&wire).unwrap()}));
        assert_eq!(shown["cm"]["counts"]["halfOpenCount"], 7);
        let mut back = snake_case(shown);
        assert_eq!(serde_json::from_value::<CmStatus>(back["cm"].take()).unwrap(), cm);
        assert_eq!(serde_json::from_value::<WireStatus>(back["wire"].take()).unwrap(), wire);
    }

    #[test]
    fn refusals_say_what_the_admin_socket_would() {
        let refusal = crate::control::api::Refusal {
            code: 409,
            reason: "AlreadyExists".into(),
            message: "another".into(),
            ..Default::default()
        };
        let failure = refused(Trouble::Refused(Box::new(refusal)));
        assert_eq!((failure.to_string(), failure.code()), ("another; see freeflow ps -a".into(), 1));
    }
}
