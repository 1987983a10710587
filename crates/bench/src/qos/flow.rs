//! A pair of containers in a network of its own, which names a QoS class of its own; perftest between them.
use crate::host::{Agent, Freeflow, REPLY_MAX};
use crate::perftest::{numbers, tail};
use crate::suite::address_of;
use crate::verbs::following::Sign;
use crate::verbs::{Job, Memory, Operation, Reply, Request, Traffic};
use std::time::Duration;

/// Time for a server to end once its client has.
const SERVER_END_MS: u64 = 2000;
/// Of the messages between the agents themselves.
const MESSAGE_BYTES: usize = 64 << 10;

/// Limits of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Of its vNICs, each; none: not metered.
    pub mbit_per_s: Option<u32>,
    pub priority: u8,
    pub weight: u16,
}

impl Class {
    pub const UNCAPPED: Self = Self { mbit_per_s: None, priority: 3, weight: 100 };

    pub fn capped(mbit_per_s: u32) -> Self {
        Self { mbit_per_s: Some(mbit_per_s), ..Self::UNCAPPED }
    }

    /// The declaration of a flow's network and class.
    pub fn declaration(&self, number: usize, data_path: &str) -> String {
        let name = network(number);
        let Self { priority, weight, .. } = self;
        let vnic = self.mbit_per_s.map_or(String::new(), |rate| format!("  vnic: {{rate: {rate}Mbit}}\n"));
        format!(
            "apiVersion: freeflow.io/v1\nkind: QosClass\nmetadata: {{name: {name}}}\nspec:\n{vnic}  priority: {priority}\n  \
             weight: {weight}\n---\napiVersion: freeflow.io/v1\nkind: Network\nmetadata: {{name: {name}}}\nspec:\n  \
             cidrs: [10.61.{number}.0/24]\n  dataPath: {data_path}\n  qosClass: {name}\n---\n"
        )
    }
}

fn network(number: usize) -> String {
    format!("flow-{number}")
}

pub struct Flow {
    server: Agent,
    client: Agent,
    address: String,
}

impl Flow {
    /// Its network must have been declared.
    pub fn new(host: &Freeflow, number: usize) -> Result<Self, String> {
        let agent = |end: &str| {
            let mut agent = host.starting_agent_in(Some(&network(number)), &format!("{end}-{number}"), &[])?;
            agent.ask(&Request::Hello)?;
            Ok::<_, String>(agent)
        };
        let (mut server, client) = (agent("server")?, agent("client")?);
        let address = address_of(&mut server)?;
        Ok(Self { server, client, address })
    }

    /// Starts the server; it listens a while after.
    pub fn listen(&mut self, argv: &[String]) -> Result<(), String> {
        self.server.ask(&Request::Start { argv: argv.to_vec() }).map(|_| ())
    }

    pub fn begin(&mut self, argv: &[String]) -> Result<(), String> {
        let argv = argv.iter().cloned().chain([self.address.clone()]).collect();
        self.client.ask(&Request::Start { argv }).map(|_| ())
    }

    /// Of a client that ends by itself.
    pub fn await_end(&mut self, within_ms: u64) -> Result<(), String> {
        self.client.send(&Request::Finish { timeout_ms: within_ms })
    }

    /// Connects the two agents themselves.
    pub fn connect(&mut self) -> Result<(), String> {
        let (traffic, operation) = (Traffic::Latency, Operation::Write);
        let job = Job { traffic, operation, bytes: MESSAGE_BYTES, slots: 1, duration_ms: 0 };
        let prepare = Request::Prepare { memory: Memory::Ordinary, job };
        let prepared = |agent: &mut Agent| match agent.ask(&prepare)? {
            Reply::Prepared(address) => Ok(address),
            other => Err(format!("unexpected: {other:?}")),
        };
        let (server, client) = (prepared(&mut self.server)?, prepared(&mut self.client)?);
        self.server.ask(&Request::Connect { peer: client })?;
        self.client.ask(&Request::Connect { peer: server }).map(|_| ())
    }

    /// The client works until a change shows.
    pub fn await_sign(&mut self, sign: Sign) -> Result<(), String> {
        self.client.ask(&Request::Follow { sign }).map(|_| ())
    }

    /// When it did.
    pub fn sign(&mut self) -> Result<u64, String> {
        match self.client.receive(REPLY_MAX)? {
            Reply::Followed { at_ns } => Ok(at_ns),
            other => Err(format!("unexpected: {other:?}")),
        }
    }

    pub fn release(&mut self) -> Result<(), String> {
        self.client.ask(&Request::Release)?;
        self.server.ask(&Request::Release).map(|_| ())
    }

    /// Ends both programs. Whether the client still ran.
    pub fn stop(&mut self) -> Result<bool, String> {
        let reply = self.client.ask(&Request::Finish { timeout_ms: 0 })?;
        self.abandon(0)?;
        Ok(matches!(reply, Reply::Output { status: None, .. }))
    }

    /// Waits for both ends, after [`Self::await_end`]: the numbers of the client's table.
    pub fn end(&mut self, within_ms: u64) -> Result<Vec<f64>, String> {
        let reply = self.client.receive(REPLY_MAX + Duration::from_millis(within_ms))?;
        let result = match reply {
            Reply::Output { status: Some(0), text } => {
                numbers(&text).ok_or_else(|| format!("no table in: {}", tail(&text)))
            }
            Reply::Output { status: Some(status), text } => Err(format!("exit {status}: {}", tail(&text))),
            Reply::Output { status: None, text } => Err(format!("took too long: {}", tail(&text))),
            other => Err(format!("unexpected: {other:?}")),
        };
        self.abandon(if result.is_ok() { SERVER_END_MS } else { 0 })?;
        result
    }

    /// Ends the server, after a while if it does not by itself.
    fn abandon(&mut self, timeout_ms: u64) -> Result<(), String> {
        self.server.ask(&Request::Finish { timeout_ms }).map(|_| ())
    }

    /// Lets the containers end meanwhile.
    pub fn dismiss(&mut self) {
        self.server.dismiss();
        self.client.dismiss();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_names_only_what_is_limited() {
        let text = Class::capped(100).declaration(7, "auto");
        assert!(text.contains("  vnic: {rate: 100Mbit}\n  priority: 3\n  weight: 100\n"));
        assert!(text.contains("  cidrs: [10.61.7.0/24]\n  dataPath: auto\n  qosClass: flow-7\n"));
        assert!(!Class::UNCAPPED.declaration(1, "routed").contains("vnic"));
    }
}
