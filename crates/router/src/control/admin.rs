//! The admin socket `RUN_DIR/admin.sock`: containers get and lose their vNICs, packets are
//! captured, the router ends. All else that the CLI wants of a router it asks the REST server.
//!
//! Only root of the router's own PID namespace is served: root inside a container that can somehow
//! reach the socket is not. Requests are done one at a time.
use crate::api::caller::{Caller, Role, is_of_this_namespace};
use crate::api::plane::ChangeObjects;
use crate::audit::Who;
use crate::base::log::{info, warning};
use crate::base::slab::Key;
use crate::control::admin_connection::{AdminConnection, AdminDone};
use crate::control::thread::{Control, Topic};
use crate::dataplane::command::Ask;
use freeflow_orchestrator::{Command, Refusal, Writer};
use freeflow_protocol::admin::{AdminErrorCode, AdminReply, AdminRequest};
use freeflow_protocol::{MESSAGE_BYTES_MAX, PROTOCOL};
use freeflow_shm::{fd, monotonic_ns};
use rustix::event::epoll;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

const CONNECTION_COUNT_MAX: usize = 64;

impl Control {
    pub(crate) fn accept_admins(&mut self) {
        while let Ok(socket) = fd::accept(&self.admin_listener) {
            let credentials = fd::peer_credentials(&socket);
            let (uid, pid) = credentials.map_or((u32::MAX, 0), |credentials| (credentials.uid, credentials.pid));
            if uid != 0 || !is_of_this_namespace(&socket, pid) {
                if let Some(left_out) = self.stranger_lines.take(monotonic_ns()) {
                    warning!(
                        "refused a client of the admin socket: not root of the router's PID namespace",
                        uid = uid,
                        pid = pid,
                        left_out = left_out
                    );
                }
                let reply = AdminReply::Failed {
                    code: AdminErrorCode::NotPermitted,
                    message: "only root on the host may ask that".into(),
                };
                let who = Who { uid, pid, role: Role::default().to_string() };
                self.note_failed(who, "connect", ("", "admin.sock"), &reply);
                let _ = fd::send_message(&socket, &freeflow_protocol::encode(&reply), &[]);
                continue;
            }
            if self.admins.len() >= CONNECTION_COUNT_MAX {
                continue;
            }
            let key = self.admins.insert(AdminConnection { socket, pid, queued: false });
            let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
            if let Some(admin) = self.admins.get(key)
                && self.watch(admin.socket.as_fd(), Topic::Admin(key), flags).is_err()
            {
                self.close_admin(key);
            }
        }
    }

    pub(crate) fn handle_admin_event(&mut self, key: Key, over: bool) {
        if over {
            return self.close_admin(key);
        }
        self.enqueue_admin(key);
    }

    fn enqueue_admin(&mut self, key: Key) {
        if let Some(admin) = self.admins.get_mut(key)
            && !std::mem::replace(&mut admin.queued, true)
        {
            self.admins_ready.push_back(key);
        }
    }

    fn close_admin(&mut self, key: Key) {
        if let Some(admin) = self.admins.remove(key) {
            self.unwatch(&admin.socket);
        }
    }

    pub(crate) fn serve_admins(&mut self) {
        for _ in 0..self.admins_ready.len() {
            if self.admin_busy {
                return;
            }
            let Some(key) = self.admins_ready.pop_front() else { return };
            self.serve_admin(key);
        }
    }

    fn serve_admin(&mut self, key: Key) {
        let Some(admin) = self.admins.get_mut(key) else { return };
        admin.queued = false;
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(MESSAGE_BYTES_MAX, 0);
        let received = fd::receive_into(&admin.socket, &mut buffer, 1);
        let bytes = received.as_ref().map_or(0, |(bytes, _)| *bytes);
        let request = freeflow_protocol::decode::<AdminRequest>(&buffer[..bytes]);
        self.buffer = buffer;
        let descriptor = match received {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) | Ok((0, _)) => return self.close_admin(key),
            Ok((_, mut descriptors)) => descriptors.pop(),
        };
        let done = match request {
            Ok(AdminRequest::Capture { packet_count_max, seconds_max }) => {
                self.capture(key, descriptor, (packet_count_max, seconds_max))
            }
            Ok(request) => self.handle_admin_request(key, request),
            Err(error) => AdminDone::Reply(AdminReply::Failed {
                code: AdminErrorCode::Invalid,
                message: format!("{error}; are freeflow and its router of the same version?"),
            }),
        };
        self.finish_admin(key, done);
    }

    /// Sends the reply, if there is one now, and goes on with the connection's next request.
    pub(crate) fn finish_admin(&mut self, key: Key, done: AdminDone) {
        let AdminDone::Reply(reply) = done else { return };
        let Some(admin) = self.admins.get(key) else { return };
        match fd::send_message(&admin.socket, &freeflow_protocol::encode(&reply), &[]) {
            Ok(()) => self.enqueue_admin(key),
            Err(_) => self.close_admin(key),
        }
    }

    /// Does a command, with its line in the audit log.
    pub(crate) fn admin_change(&mut self, key: Key, verb: &'static str, command: Command) -> Result<(), Refusal> {
        let caller = Caller::root(self.admin_pid(key));
        self.change_objects(ChangeObjects {
            caller,
            verb,
            writer: Writer::Hand,
            command,
            dry_run: false,
            only_unused: false,
        })
        .map(drop)
    }

    pub(crate) fn admin_pid(&self, key: Key) -> i32 {
        self.admins.get(key).map_or(0, |admin| admin.pid)
    }

    fn handle_admin_request(&mut self, key: Key, request: AdminRequest) -> AdminDone {
        AdminDone::Reply(match request {
            AdminRequest::Hello { protocol: _ } => AdminReply::Version {
                protocol: PROTOCOL,
                version: env!("CARGO_PKG_VERSION").into(),
                pid: std::process::id(),
            },
            AdminRequest::Attach { id, name, network, address, labels } => {
                return self.attach(key, (id, name, network), address, labels);
            }
            AdminRequest::Detach { id } => return self.detach(key, &id),
            AdminRequest::Occupy { id, container, occupied } => self.occupy(key, &id, container, occupied),
            AdminRequest::Capture { packet_count_max, seconds_max } => {
                return self.capture(key, None, (packet_count_max, seconds_max));
            }
            AdminRequest::Shutdown => {
                info!("shutdown asked for");
                self.note_done(self.admin_who(key), "shutdown", "done", String::new());
                self.stop.store(true, Relaxed);
                AdminReply::Done
            }
        })
    }

    /// Asks the worker for an admin connection: `finish` makes its reply, and the next request waits for that.
    pub(crate) fn ask_for<C: Ask>(
        &mut self,
        key: Key,
        shard: u8,
        command: C,
        finish: impl FnOnce(&mut Control, C::Answer) -> AdminReply + Send + 'static,
    ) -> AdminDone {
        self.admin_busy = true;
        self.ask(shard, command, move |control, answer| {
            control.admin_busy = false;
            let reply = finish(control, answer);
            control.finish_admin(key, AdminDone::Reply(reply));
        });
        AdminDone::Later
    }
}
