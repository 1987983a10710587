//! Verbs of multicast groups.
use crate::qp::Teardown;
use crate::{Engine, GroupChange, QpId, SessionId};
use alloc::vec::Vec;
use freeflow_verbs::{Gid, QpType, VerbsError};

impl Engine {
    // ---- verbs

    /// Attaches a UD QP to a group of its network. Attaching twice is one attachment. NoMemory: the
    /// vNIC is in too many groups, or has too many QPs in this one; or no QPN is left.
    ///
    /// # Errors
    /// InvalidArgument: not a UD QP, or not a group's address. NotFound: not the session's QP.
    pub fn attach_multicast(&mut self, session: SessionId, qp: QpId, gid: Gid) -> Result<(), VerbsError> {
        let pair = self.completer().qps.owned(session, qp)?;
        let (vnic, network) = (pair.vnic, pair.network);
        if pair.service != QpType::Ud || pair.teardown == Teardown::Destroy || !gid.is_multicast() {
            return Err(VerbsError::InvalidArgument);
        }
        if self.requester.groups.has(qp, gid) {
            return Ok(());
        }
        let is_new = !self.requester.groups.numbers.contains_key(&(network, gid));
        if is_new {
            self.check_qpns()?;
        }
        let count = self.requester.groups.counts.get(&(vnic, gid)).copied().unwrap_or(0);
        let limits = &self.completer().vnics.get(vnic).ok_or(VerbsError::NotFound)?.limits;
        if count >= limits.multicast_attach_count_max {
            return Err(VerbsError::NoMemory);
        }
        if count == 0 {
            let max = |limits: &freeflow_verbs::VnicLimits| limits.multicast_group_count_max;
            self.charge(vnic, |usage| &mut usage.multicast_groups, max)?;
        }
        self.requester.groups.counts.insert((vnic, gid), count + 1);
        self.requester.groups.groups_of.insert((qp, gid));
        self.requester.groups.members.insert((network, gid, qp));
        if is_new {
            let qpn = self.fresh_qpn();
            self.requester.groups.numbers.insert((network, gid), qpn);
            self.requester.groups.groups.insert(qpn, (network, gid));
            self.requester.groups.changes.push_back(GroupChange { network, group: gid, qpn: Some(qpn) });
        }
        Ok(())
    }

    /// Detaches a QP from a group. No message to the group begins to arrive afterwards.
    ///
    /// # Errors
    /// InvalidArgument: it is not attached. NotFound: not the session's QP.
    pub fn detach_multicast(&mut self, session: SessionId, qp: QpId, gid: Gid) -> Result<(), VerbsError> {
        self.completer().qps.owned(session, qp)?;
        if !self.requester.groups.has(qp, gid) {
            return Err(VerbsError::InvalidArgument);
        }
        self.detach(qp, gid);
        Ok(())
    }

    fn detach(&mut self, qp: QpId, gid: Gid) {
        let (vnic, network) = (self.qp(qp).vnic, self.qp(qp).network);
        self.requester.groups.groups_of.remove(&(qp, gid));
        self.requester.groups.members.remove(&(network, gid, qp));
        let count = self.requester.groups.counts.get_mut(&(vnic, gid)).expect("an attachment is counted");
        *count -= 1;
        if *count == 0 {
            self.requester.groups.counts.remove(&(vnic, gid));
            self.refund(vnic, |usage| &mut usage.multicast_groups);
        }
        if self.requester.groups.members(network, gid).next().is_none()
            && let Some(qpn) = self.requester.groups.numbers.remove(&(network, gid))
        {
            self.requester.groups.groups.remove(&qpn);
            self.requester.groups.changes.push_back(GroupChange { network, group: gid, qpn: None });
        }
    }

    /// The next change of groups for other hosts; to be asked after each verb, and after the end of
    /// a session.
    pub fn poll_group_change(&mut self) -> Option<GroupChange> {
        self.requester.groups.changes.pop_front()
    }

    /// The QP goes.
    pub(crate) fn detach_all(&mut self, qp: QpId) {
        let ends = (qp, Gid([0; 16]))..=(qp, Gid([0xff; 16]));
        let gids: Vec<Gid> = self.requester.groups.groups_of.range(ends).map(|(_, gid)| *gid).collect();
        for gid in gids {
            self.detach(qp, gid);
        }
    }
}
