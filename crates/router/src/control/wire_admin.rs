//! The wire: what the REST server shows of it, the faults that it sets, and captures.
use crate::audit::Who;
use crate::base::log::info;
use crate::base::slab::Key;
use crate::control::admin_audit::faults_text;
use crate::control::admin_connection::AdminDone;
use crate::control::message::Message;
use crate::control::thread::Control;
use crate::control::vnics::failed_io;
use crate::dataplane::capture::{self, Limits, Outcome};
use crate::dataplane::command::{BeginCapture, EndCapture, ReadWireStatus, SetWireFaults};
use crate::dataplane::wire_status::merge_wire;
use freeflow_orchestrator::{Reason, Refusal};
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, WireFaults, WireStatus};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Its verb in the audit log.
const CAPTURE: &str = "capture";
/// Longest capture, seconds: a year.
const SECONDS_MAX: u64 = 366 * 86_400;

fn log_faults(faults: Option<WireFaults>) {
    let Some(faults) = faults else { return info!("no faults of the wire any more") };
    let WireFaults { seed, loss_ppm, duplicate_ppm, reorder_ppm, delay_ppm, delay_ns, corrupt_ppm } = faults;
    info!(
        "faults of the wire",
        seed = seed,
        loss_ppm = loss_ppm,
        duplicate_ppm = duplicate_ppm,
        reorder_ppm = reorder_ppm,
        delay_ppm = delay_ppm,
        delay_ns = delay_ns,
        corrupt_ppm = corrupt_ppm
    );
}

fn no_wire() -> Refusal {
    Refusal::new(Reason::Invalid, "this router has no other hosts; bring the host up with freeflow up --peers FILE")
}

impl Control {
    /// Traffic between hosts, with a page of the QPs after a number, and whether there are more.
    pub(crate) fn wire_status(
        &mut self,
        after_qpn: Option<u32>,
        finish: impl FnOnce((WireStatus, bool)) + Send + 'static,
    ) {
        self.ask_all(|_| ReadWireStatus { after_qpn }, |_, statuses| finish(merge_wire(statuses)));
    }

    /// Loses, delays or spoils packets on purpose from now on; `None`: no more.
    pub(crate) fn set_wire_faults(
        &mut self,
        who: Who,
        faults: Option<WireFaults>,
        finish: impl FnOnce(Result<(), Refusal>) + Send + 'static,
    ) {
        let (outcome, detail) = match &faults {
            Some(faults) => ("begun", faults_text(faults)),
            None => ("ended", String::new()),
        };
        self.ask_all(
            move |_| SetWireFaults { faults },
            move |control, set| {
                let set = set.contains(&true);
                let result = if set { Ok(()) } else { Err(no_wire()) };
                if set {
                    log_faults(faults);
                }
                control.note_result(who, "wire-faults", (outcome, detail), &result);
                finish(result);
            },
        );
    }

    /// Begins a capture into `into`; the reply comes when it is over.
    pub(crate) fn capture(&mut self, key: Key, into: Option<OwnedFd>, most: (Option<u64>, Option<u64>)) -> AdminDone {
        let who = self.admin_who(key);
        let limit = |name: &str, most: Option<u64>| most.map(|most| format!("{name}={most}"));
        let limits = [limit("packets_max", most.0), limit("seconds_max", most.1)];
        match self.begin_capture(key, into, most, who.clone()) {
            None => {
                self.note_done(who, CAPTURE, "begun", limits.into_iter().flatten().collect::<Vec<_>>().join(" "));
                AdminDone::Later
            }
            Some(reply) => {
                self.note_reply(who, CAPTURE, ("begun", String::new()), &reply);
                AdminDone::Reply(reply)
            }
        }
    }

    /// The answer if there is one at once: it could not be begun.
    fn begin_capture(
        &mut self,
        key: Key,
        into: Option<OwnedFd>,
        (packet_count_max, seconds_max): (Option<u64>, Option<u64>),
        who: Who,
    ) -> Option<AdminReply> {
        let failed = |code, message: &str| Some(AdminReply::Failed { code, message: message.into() });
        let Some(into) = into else { return failed(AdminErrorCode::Invalid, "no descriptor to write to came along") };
        if self.capturing {
            return failed(AdminErrorCode::AlreadyExists, "another capture is under way");
        }
        let time_max = seconds_max.map(|seconds| Duration::from_secs(seconds.min(SECONDS_MAX)));
        let limits = Limits { packet_count_max, time_max };
        let own = self.own.clone();
        let done = move |outcome| own.send(Message::CaptureEnded { admin: key, who: Box::new(who), outcome });
        let sink = match capture::start(File::from(into), "freeflow", limits, done) {
            Ok(sink) => sink,
            Err(error) => return Some(failed_io("can't begin a capture", &error)),
        };
        self.capturing = true;
        self.workers.send_all(|_| BeginCapture { sink: Box::new(sink.clone()) });
        None
    }

    pub(crate) fn finish_capture(&mut self, key: Key, who: Who, outcome: Outcome) {
        self.capturing = false;
        self.workers.send_all(|_| EndCapture {});
        let Outcome { packets, lost, error } = outcome;
        let error = error.map(|error| error.to_string());
        let why = error.as_ref().map_or(String::new(), |error| format!(" error={error:?}"));
        self.note_done(who, CAPTURE, "ended", format!("packets={packets} lost={lost}{why}"));
        self.finish_admin(key, AdminDone::Reply(AdminReply::Captured { packets, lost, error }));
    }
}
