//! The administrator's defaults: files of one number each in `/etc/rdma/rsocket`, as rdma-core
//! reads them.
use crate::wire::round_iomap_count;
use std::path::Path;
use std::sync::OnceLock;

const DIRECTORY: &str = "/etc/rdma/rsocket";
const SEND_BYTES_MIN: u32 = 2048;
/// Four times what rdma-core takes: room is granted in parts, and while the other end learns of
/// the next, which takes a wake-up of each party in between, the others are on their way. Buffers
/// of this size grow where a stream moves much.
pub const BUFFER_BYTES: u32 = 512 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How long a call polls before it sleeps.
    pub polling_us: u32,
    /// Longest sleep of `rpoll`, ms; 0: as long as the program said.
    pub wake_up_interval_ms: u32,
    pub inline_bytes: u32,
    pub send_slots: u16,
    pub receive_slots: u16,
    pub receive_bytes: u32,
    pub send_bytes: u32,
    pub iomap_count: u16,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            polling_us: 10,
            wake_up_interval_ms: 0,
            inline_bytes: 64,
            send_slots: 384,
            receive_slots: 384,
            receive_bytes: BUFFER_BYTES,
            send_bytes: BUFFER_BYTES,
            iomap_count: 0,
        }
    }
}

impl Config {
    /// Read once for each process.
    pub fn of_machine() -> &'static Self {
        static CONFIG: OnceLock<Config> = OnceLock::new();
        CONFIG.get_or_init(|| Self::from_files(|name| std::fs::read_to_string(Path::new(DIRECTORY).join(name)).ok()))
    }

    /// A file that is not there, or holds no number, leaves the default.
    fn from_files(read: impl Fn(&str) -> Option<String>) -> Self {
        let default = Self::default();
        let number = |name: &str| {
            let text = read(name)?;
            let digits: String = text.trim_start().chars().take_while(char::is_ascii_digit).collect();
            digits.parse::<u32>().ok()
        };
        let slots = |name: &str, default: u16| number(name).map_or(default, |value| value.min(0xFFFE) as u16);
        let send_bytes = number("wmem_default").unwrap_or(default.send_bytes);
        Self {
            polling_us: number("polling_time").unwrap_or(default.polling_us),
            wake_up_interval_ms: number("wake_up_interval").unwrap_or(default.wake_up_interval_ms),
            inline_bytes: number("inline_default").unwrap_or(default.inline_bytes),
            send_slots: slots("sqsize_default", default.send_slots),
            receive_slots: slots("rqsize_default", default.receive_slots),
            receive_bytes: number("mem_default").unwrap_or(default.receive_bytes).max(1),
            send_bytes: if send_bytes < SEND_BYTES_MIN { SEND_BYTES_MIN * 2 } else { send_bytes },
            iomap_count: number("iomap_size").map_or(default.iomap_count, round_iomap_count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_defaults() {
        assert_eq!(Config::from_files(|_| None), Config::default());
        let config = Config::from_files(|name| {
            let text = match name {
                "polling_time" => "0\n",
                "mem_default" => " 1000000 bytes",
                "wmem_default" => "1",
                "sqsize_default" => "70000",
                "rqsize_default" => "many",
                "iomap_size" => "300",
                _ => return None,
            };
            Some(text.to_owned())
        });
        assert_eq!((config.polling_us, config.receive_bytes, config.send_bytes), (0, 1_000_000, 4096));
        assert_eq!((config.send_slots, config.receive_slots, config.iomap_count), (0xFFFE, 384, 256));
    }
}
