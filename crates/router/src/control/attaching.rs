//! Attachments of vNICs on the control thread: making each, and the vNIC's fate when it ends.
use crate::admission::account::Account;
use crate::attachment::Attachment;
use crate::attachment::guest::{Guest, GuestParameters};
use crate::attachment::local::Local;
use crate::attachment::remote::{ANSWER_TIME_MAX, Remote};
use crate::base::deferred_drop::Closer;
use crate::base::log::warning;
use crate::base::slab::Key;
use crate::control::message::Message;
use crate::control::thread::Control;
use crate::control::vnic_entry::{Record, directory};
use std::io;
use std::sync::Arc;

impl Control {
    /// Of a new vNIC.
    ///
    /// # Errors
    /// As [`Self::new_attachment`]; or the shared-memory device of a virtual machine can't be made.
    pub(crate) fn first_attachment(
        &self,
        record: &Record,
        account: Arc<Account>,
        closer: Arc<Closer>,
    ) -> io::Result<Arc<dyn Attachment>> {
        let Some(bytes) = record.guest_memory() else { return self.new_attachment(&record.id, account, closer) };
        let (own, vnic) = (self.own.clone(), record.id.clone());
        let connected = move |connection| {
            own.send(Message::GuestConnected { vnic: vnic.clone(), connection: Box::new(connection) });
        };
        // Twice: the limit itself is refused by a reply to Hello.
        let connection_count_max = u64::from(record.limits.session_count_max).saturating_mul(2);
        let parameters = GuestParameters { account, connection_count_max, connected: Arc::new(connected) };
        let directory = directory(&self.config.run_dir, &record.id);
        Ok(Arc::new(Guest::start(&record.id, &directory, bytes, parameters)?))
    }

    /// As this router has it, for the vNIC of this name.
    ///
    /// # Errors
    /// The process of the near halves has ended, or there is no thread or descriptor to be had.
    pub(crate) fn new_attachment(
        &self,
        id: &str,
        account: Arc<Account>,
        closer: Arc<Closer>,
    ) -> io::Result<Arc<dyn Attachment>> {
        let Some(near_halves) = &self.config.near_halves else { return Ok(Arc::new(Local::new(account, closer))) };
        let (own, vnic) = (self.own.clone(), id.to_owned());
        let ended = move || own.send(Message::AttachmentEnded { vnic });
        Ok(Arc::new(Remote::start(near_halves.open(id)?, ANSWER_TIME_MAX, ended)?))
    }

    /// A vNIC whose attachment has ended gets another one, for who connects now.
    pub(crate) fn renew_attachment(&mut self, key: Key) -> io::Result<()> {
        let Some(entry) = self.vnics.get(key).filter(|entry| entry.attachment.ended().is_some()) else { return Ok(()) };
        let (id, account, closer) = (entry.record.id.clone(), entry.account.clone(), entry.closer.clone());
        // Its message may be on the way: connections of the old one must not outlive it.
        self.handle_attachment_ended(&id);
        let renewed = self.new_attachment(&id, account, closer)?;
        if let Some(entry) = self.vnics.get_mut(key) {
            entry.attachment = renewed;
            entry.has_attachment_failed = false;
        }
        Ok(())
    }

    /// The vNIC fails, as when the worker gives it up: it takes sessions again.
    pub(crate) fn handle_attachment_ended(&mut self, vnic: &str) {
        let entry = self.vnics_by_id.get(vnic).and_then(|&key| self.vnics.get_mut(key));
        // Another one of this name, perhaps, or with another attachment by now.
        let Some(entry) = entry.filter(|entry| !entry.has_attachment_failed) else { return };
        let Some(reason) = entry.attachment.ended() else { return };
        entry.has_attachment_failed = true;
        entry.failed = Some(reason);
        if self.may_log(vnic) {
            warning!("vNIC failed", vnic = vnic, reason = reason);
        }
        self.publish_phase(vnic);
        self.close_connections_of(vnic);
    }
}
