//! Limits on the number of objects: of vNICs, and of networks.
use crate::networks::in_words_of_vnic;
use crate::{Engine, RefusalCounts, Refused, SessionId, Usage, VnicId};
use freeflow_verbs::{NetworkId, NetworkLimits, VerbsError, VnicLimits};

impl Engine {
    /// In force for what is made from now on; nothing is taken away.
    ///
    /// # Errors
    /// NotFound: no such vNIC.
    pub fn set_limits(&mut self, vnic: VnicId, limits: VnicLimits) -> Result<(), VerbsError> {
        self.requester.responder.completer.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?.limits = limits;
        Ok(())
    }

    /// Limits of the vNIC in force. `None`: no such vNIC.
    pub fn limits(&self, vnic: VnicId) -> Option<VnicLimits> {
        self.completer().vnics.get(vnic).map(|vnic| vnic.limits)
    }

    /// Of all vNICs of a network together, also of those that come later.
    pub fn set_network_limits(&mut self, network: NetworkId, limits: NetworkLimits) {
        self.networks.networks.entry(network).or_default().limits = limits;
        self.networks.forget_if_plain(network);
    }

    /// Use of all vNICs of a network together.
    pub fn network_usage(&self, network: NetworkId) -> Usage {
        self.networks.networks.get(&network).map_or_else(Usage::default, |network| network.usage)
    }

    /// How often each limit refused the vNIC something.
    pub fn refusals(&self, vnic: VnicId) -> Option<RefusalCounts> {
        let vnic = self.completer().vnics.get(vnic)?;
        Some(RefusalCounts { by_vnic: Refused::of(&vnic.refused), by_network: Refused::of(&vnic.refused_by_network) })
    }

    /// Counts one more object, or says that the vNIC or its network has no room for it.
    pub(crate) fn charge(
        &mut self,
        vnic: VnicId,
        count: fn(&mut Usage) -> &mut u32,
        max: fn(&VnicLimits) -> u32,
    ) -> Result<(), VerbsError> {
        let vnic = self.requester.responder.completer.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let network = self.networks.networks.get_mut(&vnic.network).expect("a vNIC's network is known");
        let refused = if *count(&mut vnic.usage) >= max(&vnic.limits) {
            count(&mut vnic.refused)
        } else if *count(&mut network.usage) >= max(&in_words_of_vnic(&network.limits)) {
            count(&mut vnic.refused_by_network)
        } else {
            *count(&mut vnic.usage) += 1;
            *count(&mut network.usage) += 1;
            return Ok(());
        };
        *refused = refused.saturating_add(1);
        Err(VerbsError::NoMemory)
    }

    pub(crate) fn refund(&mut self, vnic: VnicId, count: fn(&mut Usage) -> &mut u32) {
        let Some(vnic) = self.requester.responder.completer.vnics.get_mut(vnic) else { return };
        *count(&mut vnic.usage) -= 1;
        if let Some(network) = self.networks.networks.get_mut(&vnic.network) {
            *count(&mut network.usage) -= 1;
        }
    }

    /// NoMemory if the vNIC may not register so many bytes, `before` of them already counted.
    pub(crate) fn check_registered(&mut self, session: SessionId, before: u64, after: u64) -> Result<(), VerbsError> {
        let vnic = self.requester.responder.session_vnic(session)?;
        let home = self.requester.responder.completer.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let network = self.networks.networks.get(&home.network).expect("a vNIC's network is known");
        let fits = |held: u64, most: u64| {
            after <= before || (held - before).checked_add(after).is_some_and(|total| total <= most)
        };
        let refused = if !fits(home.usage.registered_bytes, home.limits.registered_bytes_max) {
            &mut home.refused.registered_bytes
        } else if !fits(network.usage.registered_bytes, network.limits.registered_bytes_max.unwrap_or(u64::MAX)) {
            &mut home.refused_by_network.registered_bytes
        } else {
            return Ok(());
        };
        *refused += 1;
        Err(VerbsError::NoMemory)
    }

    /// An implicit region's bytes can't be counted: where the vNIC or its network is held to a
    /// number of them, there is none.
    pub(crate) fn check_implicit(&mut self, session: SessionId) -> Result<(), VerbsError> {
        let vnic = self.requester.responder.session_vnic(session)?;
        let home = self.requester.responder.completer.vnics.get_mut(vnic).ok_or(VerbsError::NotFound)?;
        let network = self.networks.networks.get(&home.network).expect("a vNIC's network is known");
        let refused = if home.limits.registered_bytes_max < VnicLimits::default().registered_bytes_max {
            &mut home.refused.registered_bytes
        } else if network.limits.registered_bytes_max.is_some() {
            &mut home.refused_by_network.registered_bytes
        } else {
            return Ok(());
        };
        *refused += 1;
        Err(VerbsError::NoMemory)
    }

    pub(crate) fn count_registered(&mut self, session: SessionId, before: u64, after: u64) {
        if let Ok(vnic) = self.requester.responder.session_vnic(session)
            && let Some(home) = self.requester.responder.completer.vnics.get_mut(vnic)
        {
            home.usage.registered_bytes = home.usage.registered_bytes - before + after;
            if let Some(network) = self.networks.networks.get_mut(&home.network) {
                network.usage.registered_bytes = network.usage.registered_bytes - before + after;
            }
        }
    }
}
