//! The worker's mode.

/// How the worker waits when there is nothing to do (the paper's terms, section 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Spins for ever: lowest latency, one core used up.
    Fastpath,
    /// Sleeps as soon as there is nothing to do.
    #[value(name = "lowcpu")]
    LowCpu,
    /// Spins while there is work, then sleeps.
    #[default]
    Adaptive,
    /// One of the others, as the latency classes of the host's vNICs want it.
    Auto,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Fastpath => "fastpath",
            Self::LowCpu => "lowcpu",
            Self::Adaptive => "adaptive",
            Self::Auto => "auto",
        }
    }
}
