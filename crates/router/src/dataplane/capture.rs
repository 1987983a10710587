//! `freeflow capture`: packets of the wire as pcapng.
//!
//! The worker leaves each packet in a bounded queue and never waits; what finds no room is counted
//! as lost. A thread writes them to the descriptor that came with the request: a reader that is
//! slow, gone or without room on its disk costs this thread's time alone.
use crate::base::privileges::{self, ThreadKind};
use freeflow_backend::{CaptureSink, Captured, pcapng};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Packets that wait to be written, at most.
const QUEUE_PACKETS_MAX: usize = 8192;
/// Written at once, about.
const WRITE_BYTES: usize = 1 << 18;
/// The reader's end is noticed within this time even if no packets come.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// When a capture ends by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    pub packet_count_max: Option<u64>,
    pub time_max: Option<Duration>,
}

/// Result of a capture.
#[derive(Debug)]
pub struct Outcome {
    pub packets: u64,
    pub lost: u64,
    /// Why it ended, if its reader did not simply leave and no limit was reached.
    pub error: Option<io::Error>,
}

/// The end of each worker.
#[derive(Clone)]
pub struct Sink {
    queue: SyncSender<Vec<u8>>,
    lost: Arc<AtomicU64>,
}

impl CaptureSink for Sink {
    fn packet(&mut self, packet: &Captured<'_>) {
        let mut block = Vec::with_capacity(packet.bytes.len() + 128);
        pcapng::packet(packet, &mut block);
        if self.queue.try_send(block).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

/// Begins a capture: gives what the worker shows its packets to, and starts the thread that writes
/// them. `done` is called by that thread when it is over.
pub fn start(
    into: File,
    interface: &str,
    limits: Limits,
    done: impl FnOnce(Outcome) + Send + 'static,
) -> io::Result<Sink> {
    let (queue, packets) = sync_channel(QUEUE_PACKETS_MAX);
    let lost = Arc::new(AtomicU64::new(0));
    let sink = Sink { queue, lost: lost.clone() };
    let mut begin = Vec::new();
    pcapng::begin(interface, &mut begin);
    let deadline = limits.time_max.map(|time| Instant::now() + time);
    let mut writer = Writer { into, packets, limit: limits.packet_count_max.unwrap_or(u64::MAX), deadline, written: 0 };
    let body = move || {
        privileges::enter(ThreadKind::Capture);
        let error = writer.run(begin).err().filter(|error| error.kind() != io::ErrorKind::BrokenPipe);
        done(Outcome { packets: writer.written, lost: lost.load(Relaxed), error });
    };
    std::thread::Builder::new().name("ff-capture".into()).spawn(body)?;
    Ok(sink)
}

struct Writer {
    into: File,
    packets: Receiver<Vec<u8>>,
    limit: u64,
    deadline: Option<Instant>,
    written: u64,
}

impl Writer {
    /// Until a limit is reached, the worker shows no more, or the file takes no more.
    fn run(&mut self, mut buffer: Vec<u8>) -> io::Result<()> {
        self.into.write_all(&buffer)?;
        while self.written < self.limit {
            let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break;
            }
            match self.packets.recv_timeout(left.unwrap_or(LOOK_INTERVAL).min(LOOK_INTERVAL)) {
                Ok(packet) => {
                    let count = self.gather(packet, &mut buffer);
                    self.into.write_all(&buffer)?;
                    self.written += count;
                }
                Err(RecvTimeoutError::Timeout) if self.reader_is_gone() => break,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(())
    }

    /// Takes what is there, as far as the limit allows.
    fn gather(&self, first: Vec<u8>, buffer: &mut Vec<u8>) -> u64 {
        buffer.clear();
        buffer.extend(first);
        let mut count = 1;
        while buffer.len() < WRITE_BYTES
            && self.written + count < self.limit
            && let Ok(packet) = self.packets.try_recv()
        {
            buffer.extend(packet);
            count += 1;
        }
        count
    }

    fn reader_is_gone(&self) -> bool {
        let mut polled = [PollFd::new(&self.into, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&at_once)).is_ok_and(|count| count > 0)
            && polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_backend::Direction;
    use std::io::Read;
    use std::net::SocketAddr;
    use std::sync::mpsc::channel;

    fn show(sink: &mut dyn CaptureSink, bytes: &[u8]) {
        let address: SocketAddr = "192.0.2.1:4791".parse().unwrap();
        sink.packet(&Captured {
            time_ns: 1,
            direction: Direction::Sent,
            source: address,
            destination: address,
            traffic_class: 0,
            hop_limit: 64,
            identification: 0,
            bytes,
        });
    }

    #[test]
    fn a_capture_ends_with_its_last_packet() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (done, outcome) = channel();
        let limits = Limits { packet_count_max: Some(3), time_max: None };
        let mut sink = start(File::from(writer), "test", limits, move |outcome| done.send(outcome).unwrap()).unwrap();
        (0..5).for_each(|_| show(&mut sink, &[7; 32]));
        let outcome = outcome.recv().unwrap();
        assert!(outcome.packets == 3 && outcome.error.is_none(), "{outcome:?}");
        let mut bytes = Vec::new();
        File::from(reader).read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.windows(32).filter(|window| *window == [7; 32]).count(), 3);
    }

    #[test]
    fn who_reads_nothing_loses_packets_and_delays_nobody() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (done, outcome) = channel();
        let mut sink =
            start(File::from(writer), "test", Limits::default(), move |outcome| done.send(outcome).unwrap()).unwrap();
        (0..2 * QUEUE_PACKETS_MAX).for_each(|_| show(&mut sink, &[7; 4096]));
        drop(reader);
        let outcome = outcome.recv().unwrap();
        assert!(outcome.lost > 0 && outcome.error.is_none(), "{outcome:?}");
    }

    #[test]
    fn a_full_disk_is_said() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (done, outcome) = channel();
        let _sink = start(full, "test", Limits::default(), move |outcome| done.send(outcome).unwrap()).unwrap();
        assert_eq!(outcome.recv().unwrap().error.unwrap().kind(), io::ErrorKind::StorageFull);
    }
}
