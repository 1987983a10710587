//! vNICs that have come to this host are announced again for a while. Another host drops what comes under their
//! addresses until it has heard that they are here ([`freeflow_hostnet::fence`]), also their first announcement; and
//! containers there would go on sending to the former holder.
use crate::holders::Holders;
use crate::record::Records;
use freeflow_hostnet::ports;
use freeflow_hostnet::run_dir::RunDir;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// After its container was first seen to have it.
const TIMES: [Duration; 4] =
    [Duration::from_millis(300), Duration::from_millis(1000), Duration::from_millis(2500), Duration::from_secs(5)];
/// A container takes so long to be made, at most.
const START_TIME: Duration = Duration::from_secs(60);

/// vNICs that are being announced, by name.
#[derive(Default)]
pub struct Announcements(BTreeMap<String, Announcement>);

struct Announcement {
    /// When the vNIC was given to whoever asked for it here.
    since: Instant,
    /// When its container was first seen to have it.
    begun: Option<Instant>,
    count: usize,
}

impl Announcements {
    /// A container that starts here has this vNIC now.
    pub fn begin(&mut self, name: &str) {
        let new = || Announcement { since: Instant::now(), begun: None, count: 0 };
        self.0.entry(name.to_owned()).or_insert_with(new);
    }

    pub fn is_busy(&self) -> bool {
        !self.0.is_empty()
    }

    /// Announces those whose time it is. `address_of`: of a vNIC that is declared.
    pub fn run(&mut self, run_dir: &RunDir, address_of: impl Fn(&str) -> Option<IpAddr>) {
        self.0.retain(|name, announcement| {
            let Announcement { since, begun, count } = announcement;
            let Some(address) = address_of(name).filter(|_| begun.is_some() || since.elapsed() < START_TIME) else {
                return false;
            };
            let Some(pid) = process_of(run_dir, name) else { return begun.is_none() };
            let begun = *begun.get_or_insert_with(Instant::now);
            if begun.elapsed() >= TIMES[*count] {
                // One whose container has ended, or has no such interface yet, is tried again.
                let _ = ports::announce_again(run_dir, name, address, pid);
                *count += 1;
            }
            *count < TIMES.len()
        });
    }
}

/// A process of the container that has a vNIC.
fn process_of(run_dir: &RunDir, vnic: &str) -> Option<u32> {
    let ours = Records::of(run_dir).list().into_iter().find(|record| record.id == vnic && record.is_live());
    let ours = ours.and_then(|record| record.init).map(|init| init.pid);
    let holders = || Holders::of(run_dir).live().into_iter().find(|holder| holder.vnic == vnic);
    ours.or_else(|| holders().map(|holder| holder.process.pid))
}
