//! Processes. Apart from the tests of descriptors: a child that is not yet executing holds copies of all of them.
use freeflow_shm::fd;

#[test]
fn a_pidfd_shows_when_its_process_ends() {
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    assert!(fd::pidfd_alive(&pidfd));
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(!fd::pidfd_alive(&pidfd));
}
