//! How the worker waits, as the orchestrator decides it: after each change of what is declared, and of what runs here.
use crate::base::log::info;
use crate::config::Mode;
use crate::control::thread::Control;
use crate::dataplane::command::SetMode;
use freeflow_orchestrator::objects::HostMode;
use freeflow_shm::cpu_count;

impl From<Mode> for HostMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Fastpath => Self::Fastpath,
            Mode::LowCpu => Self::Lowcpu,
            Mode::Adaptive => Self::Adaptive,
            Mode::Auto => Self::Auto,
        }
    }
}

impl From<HostMode> for Mode {
    fn from(mode: HostMode) -> Self {
        match mode {
            HostMode::Fastpath => Self::Fastpath,
            HostMode::Lowcpu => Self::LowCpu,
            HostMode::Adaptive => Self::Adaptive,
            HostMode::Auto => Self::Auto,
        }
    }
}

impl Control {
    /// Decides again, and notifies the worker if that changes anything.
    pub(crate) fn choose_mode(&mut self) {
        let (host, usual) = (self.config.host_name(), self.config.mode.into());
        let is_occupied = |id: &str| self.occupied.contains_key(id);
        let decision = self.state.mode_of(&host, usual, cpu_count() as u32, is_occupied);
        let before = std::mem::replace(&mut self.mode, decision);
        if before.mode == self.mode.mode {
            return;
        }
        info!("the router waits otherwise", mode = Mode::from(self.mode.mode).name(), reason = self.mode.reason);
        let mode = Mode::from(self.mode.mode);
        self.workers.send_all(|_| SetMode { mode });
        self.peers.set_sleeps_at_once(mode == Mode::LowCpu);
    }
}
