//! The system calls of each kind of thread: what its filter lets pass. Whatever is not listed
//! answers EPERM and is a line of the log.
//!
//! The lists are by purpose, and generous within one: a call that a newer C library makes in place
//! of another does no harm by being listed before it is made. `scripts/syscalls` finds what a list
//! lacks. Where a call is listed for some of its arguments only ([`When`]), those are numbers in
//! registers: a filter can't look into memory.
//!
//! A thread has the filters of the thread that began it, too: so a kind's list holds what those
//! need that it begins ([`begun_by`]).
use crate::base::privileges::ThreadKind;
use freeflow_shm::FilterInstruction;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::io;

pub type Filter = Vec<FilterInstruction>;

/// For which arguments a call is let pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    Always,
    /// These bits of an argument are one of the values. Arguments are numbered from 0.
    Is {
        argument: u8,
        mask: u32,
        values: &'static [u32],
    },
    /// The first argument is the number of this process.
    OwnProcess,
}

const fn is_one_of(argument: u8, values: &'static [u32]) -> When {
    When::Is { argument, mask: u32::MAX, values }
}

/// Opens for reading, and makes nothing.
const fn reads(argument: u8) -> When {
    When::Is {
        argument,
        mask: (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u32,
        values: &[libc::O_RDONLY as u32],
    }
}

/// The caller itself, where a number would name another.
const ITSELF: When = is_one_of(0, &[0]);
/// Pages are made, or become, anything but executable.
const NOT_EXECUTABLE: When = When::Is { argument: 2, mask: libc::PROT_EXEC as u32, values: &[0] };
/// A process is begun, not a thread.
const PROCESS: When = When::Is { argument: 0, mask: libc::CLONE_THREAD as u32, values: &[0] };
const LOCAL_OR_IP: When = is_one_of(0, &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32]);
/// Names of threads and mappings; PR_GET_AUXV, which rustix asks.
const NAMES: When =
    is_one_of(0, &[libc::PR_SET_NAME as u32, libc::PR_GET_NAME as u32, libc::PR_SET_VMA as u32, 0x4155_5856]);
/// UFFDIO_API and UFFDIO_REGISTER (crates/shm/src/missing.rs), PROCMAP_QUERY (crates/shm/src/process_area.rs), and
/// flags of a descriptor.
const DESCRIPTOR: When = is_one_of(
    1,
    &[0xc018_aa3f, 0xc020_aa00, 0xc068_6611, libc::FIONBIO as u32, libc::FIOCLEX as u32, libc::FIONREAD as u32],
);
/// PTRACE_GETREGS, SETREGS, DETACH, SEIZE, INTERRUPT: no memory.
const STOPS: When = is_one_of(0, &[12, 13, 17, 0x4206, 0x4207]);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    name: &'static str,
    number: i64,
    when: When,
}

impl Call {
    pub fn name(&self) -> &'static str {
        self.name.strip_prefix("SYS_").unwrap_or(self.name)
    }

    /// One of them has to hold, if there are any.
    fn rules(&self) -> Result<Vec<SeccompRule>, BackendError> {
        let own = [std::process::id()];
        let (argument, mask, values): (u8, u32, &[u32]) = match self.when {
            When::Always => return Ok(Vec::new()),
            When::Is { argument, mask, values } => (argument, mask, values),
            When::OwnProcess => (0, u32::MAX, &own),
        };
        let rule = |&value: &u32| {
            let is = SeccompCmpOp::MaskedEq(mask.into());
            SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, is, value.into())?])
        };
        values.iter().map(rule).collect()
    }
}

macro_rules! calls {
    (@when) => { When::Always };
    (@when $when:expr) => { $when };
    ($($(#[$if:meta])? $name:ident $(if $when:expr)?),* $(,)?) => {
        &[$($(#[$if])? Call { name: stringify!($name), number: libc::$name, when: calls!(@when $($when)?) }),*]
    };
}

/// Of every thread: the C library's and Rust's own, the allocator's, a panic's, a line of the log.
const RUNTIME: &[Call] = calls![
    #[cfg(target_arch = "x86_64")] SYS_arch_prctl,
    SYS_brk,
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_close,
    SYS_exit,
    SYS_exit_group,
    SYS_fcntl,
    SYS_fstat,
    SYS_futex,
    SYS_getcpu,
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getpid,
    SYS_getpriority,
    SYS_getrandom,
    SYS_getrusage,
    SYS_gettid,
    SYS_gettimeofday,
    SYS_getuid,
    SYS_lseek,
    SYS_madvise,
    SYS_membarrier,
    SYS_mmap if NOT_EXECUTABLE,
    SYS_mprotect if NOT_EXECUTABLE,
    SYS_mremap,
    SYS_munmap,
    SYS_nanosleep,
    SYS_newfstatat,
    // The allocator looks at /proc and /sys.
    #[cfg(target_arch = "x86_64")] SYS_open if reads(1),
    SYS_openat if reads(2),
    #[cfg(target_arch = "x86_64")] SYS_poll,
    SYS_ppoll,
    SYS_prctl if NAMES,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_prlimit64 if ITSELF,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_read,
    SYS_readv,
    SYS_restart_syscall,
    SYS_rseq,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sched_getaffinity,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_setaffinity if ITSELF,
    SYS_sched_setattr if ITSELF,
    SYS_sched_yield,
    SYS_set_robust_list,
    SYS_set_tid_address,
    SYS_sigaltstack,
    SYS_statx,
    SYS_sysinfo,
    // abort, and a signal that is passed on.
    SYS_tgkill if When::OwnProcess,
    #[cfg(target_arch = "x86_64")] SYS_time,
    SYS_uname,
    SYS_write,
    SYS_writev,
];

/// Waiting for descriptors.
const EVENTS: &[Call] = calls![
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait,
    SYS_eventfd2,
    SYS_pipe2,
    #[cfg(target_arch = "x86_64")]
    SYS_select,
    SYS_pselect6,
    SYS_timerfd_create,
    SYS_timerfd_gettime,
    SYS_timerfd_settime,
];

/// Looking at files and directories, beside reading those that are known.
const FILES: &[Call] = calls![
    #[cfg(target_arch = "x86_64")]
    SYS_access,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_fstatfs,
    SYS_getcwd,
    SYS_getdents64,
    #[cfg(target_arch = "x86_64")]
    SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    SYS_readlink,
    SYS_readlinkat,
    #[cfg(target_arch = "x86_64")]
    SYS_stat,
    SYS_statfs,
];

/// Making, changing, naming and removing files.
const FILES_CHANGED: &[Call] = calls![
    #[cfg(target_arch = "x86_64")]
    SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    SYS_chown,
    SYS_copy_file_range,
    SYS_dup,
    #[cfg(target_arch = "x86_64")]
    SYS_dup2,
    SYS_dup3,
    SYS_fadvise64,
    SYS_fallocate,
    SYS_fchmod,
    SYS_fchmodat,
    #[cfg(target_arch = "x86_64")]
    SYS_fchmodat2,
    SYS_fchown,
    SYS_fchownat,
    SYS_fdatasync,
    SYS_flock,
    SYS_fsync,
    SYS_ftruncate,
    #[cfg(target_arch = "x86_64")]
    SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    SYS_link,
    SYS_linkat,
    #[cfg(target_arch = "x86_64")]
    SYS_mkdir,
    SYS_mkdirat,
    #[cfg(target_arch = "x86_64")]
    SYS_open,
    SYS_openat,
    #[cfg(target_arch = "x86_64")]
    SYS_rename,
    SYS_renameat,
    SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    SYS_rmdir,
    SYS_sendfile,
    #[cfg(target_arch = "x86_64")]
    SYS_symlink,
    SYS_symlinkat,
    SYS_sync_file_range,
    SYS_umask,
    #[cfg(target_arch = "x86_64")]
    SYS_unlink,
    SYS_unlinkat,
    SYS_utimensat,
];

/// Punching holes into files.
const CLEARING: &[Call] = calls![SYS_fallocate];

/// Opening files for whatever.
const OPENING: &[Call] = calls![
    #[cfg(target_arch = "x86_64")]
    SYS_open,
    SYS_openat
];

/// Memory that processes share.
const SEGMENTS: &[Call] = calls![
    SYS_ftruncate,
    SYS_ioctl if DESCRIPTOR,
    SYS_memfd_create,
    SYS_mlock,
    SYS_munlock,
    SYS_userfaultfd,
];

/// Sockets that are there.
const SOCKETS: &[Call] = calls![
    SYS_accept,
    SYS_accept4,
    SYS_getpeername,
    SYS_getsockname,
    SYS_getsockopt,
    SYS_ioctl if DESCRIPTOR,
    SYS_recvfrom,
    SYS_recvmmsg,
    SYS_recvmsg,
    SYS_sendmmsg,
    SYS_sendmsg,
    SYS_sendto,
    SYS_setsockopt,
    SYS_shutdown,
];

const SOCKETS_MADE: &[Call] = calls![SYS_bind, SYS_connect, SYS_listen, SYS_socket if LOCAL_OR_IP, SYS_socketpair];

/// Other processes: whether they live, and have ended.
const PROCESSES: &[Call] = calls![SYS_pidfd_open, SYS_wait4, SYS_waitid];

/// Stopping the threads of a process while its library moves its memory.
const STOPPING: &[Call] = calls![SYS_ptrace if STOPS];

/// Beginning a thread that then has less, [`crate::base::privileges::enter`].
const BEGINNING: &[Call] = calls![SYS_capget, SYS_capset, SYS_clone, SYS_clone3, SYS_seccomp];

/// Calls that begin a process, or what may be one: clone3's flags are in memory. They answer
/// ENOSYS, whereupon the C library calls clone, whose flags are in a register. They are not
/// trapped: the C library blocks all signals there, so the trap would end the router.
const NO_PROCESS: &[Call] = calls![
    SYS_clone if PROCESS,
    SYS_clone3,
    #[cfg(target_arch = "x86_64")] SYS_fork,
    #[cfg(target_arch = "x86_64")] SYS_vfork,
];
/// The same where no thread is begun, either.
const NO_THREAD: &[Call] = calls![
    SYS_clone,
    SYS_clone3,
    #[cfg(target_arch = "x86_64")]
    SYS_fork,
    #[cfg(target_arch = "x86_64")]
    SYS_vfork,
];
const ABSENT: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);

/// System calls of the process itself while it starts.
const START: &[Call] = calls![SYS_signalfd4, SYS_setrlimit];

fn purposes(kind: ThreadKind) -> &'static [&'static [Call]] {
    match kind {
        // It puts a new file in the log's place.
        ThreadKind::Main => &[EVENTS, FILES, FILES_CHANGED],
        ThreadKind::Api => &[EVENTS, FILES, SOCKETS, PROCESSES],
        ThreadKind::ApiDisk | ThreadKind::Audit | ThreadKind::Store | ThreadKind::Sysfs => &[FILES, FILES_CHANGED],
        ThreadKind::Attachment => &[EVENTS, SOCKETS],
        // Opens the files that a process shares, and maps them.
        ThreadKind::Borrow => &[FILES, OPENING, SEGMENTS],
        ThreadKind::Capture => &[],
        // Closes; the sockets and files are a tenant's.
        ThreadKind::Closer => &[],
        ThreadKind::Control => &[EVENTS, FILES, FILES_CHANGED, SEGMENTS, SOCKETS, SOCKETS_MADE, PROCESSES],
        ThreadKind::SlowPath | ThreadKind::CopyThread => &[],
        ThreadKind::Near => &[EVENTS, SOCKETS, PROCESSES],
        ThreadKind::NearHalves => &[SOCKETS],
        ThreadKind::NetworkReconciler => &[SOCKETS, PROCESSES],
        // Clears the file of a shared-memory device.
        ThreadKind::Guest => &[EVENTS, SOCKETS, SOCKETS_MADE, CLEARING],
        ThreadKind::Freezer => &[FILES, PROCESSES, STOPPING],
        // Opens a process' memory for writing, too.
        ThreadKind::Identify => &[FILES, OPENING, PROCESSES],
        ThreadKind::Peers => &[EVENTS, FILES, SOCKETS, SOCKETS_MADE],
        ThreadKind::Worker => &[EVENTS, SEGMENTS, SOCKETS, SOCKETS_MADE],
    }
}

/// Those that threads of a kind begin.
fn begun_by(kind: ThreadKind) -> &'static [ThreadKind] {
    match kind {
        ThreadKind::Api => &[ThreadKind::ApiDisk],
        // Also what a job that it runs in the worker's place begins.
        ThreadKind::Control => &[
            ThreadKind::Attachment,
            ThreadKind::Borrow,
            ThreadKind::Capture,
            ThreadKind::Closer,
            ThreadKind::SlowPath,
            ThreadKind::Freezer,
            ThreadKind::Guest,
            ThreadKind::Identify,
            ThreadKind::Store,
        ],
        ThreadKind::Guest => &[ThreadKind::Attachment],
        ThreadKind::Near => &[ThreadKind::Closer, ThreadKind::SlowPath, ThreadKind::Freezer, ThreadKind::Identify],
        ThreadKind::NearHalves => &[ThreadKind::Near],
        ThreadKind::Worker => &[ThreadKind::Closer, ThreadKind::SlowPath],
        _ => &[],
    }
}

/// By name, each once: where one of several lists has a call always, it is had always.
pub fn of(kind: ThreadKind) -> Vec<Call> {
    let own = [RUNTIME].into_iter().chain(purposes(kind).iter().copied()).flatten().copied();
    let begun = begun_by(kind).iter().flat_map(|&kind| of(kind));
    let beginning = if begun_by(kind).is_empty() { &[] } else { BEGINNING };
    merge(own.chain(begun).chain(beginning.iter().copied()))
}

/// Of the process while it starts, and of all its threads: what any of them may do.
pub fn of_start() -> Vec<Call> {
    let all = [START, BEGINNING, SEGMENTS, SOCKETS_MADE].into_iter().flatten().copied();
    merge(all.chain(ThreadKind::ALL.into_iter().flat_map(of)))
}

fn merge(calls: impl Iterator<Item = Call>) -> Vec<Call> {
    let mut merged: BTreeMap<&str, Call> = BTreeMap::new();
    for call in calls {
        let known = merged.entry(call.name).or_insert(call);
        known.when = known.when.min(call.when);
    }
    merged.into_values().collect()
}

/// The programs of the filters that a thread of this kind takes. Errors: the processor is none that is known here.
pub fn filters(kind: ThreadKind) -> io::Result<Vec<Filter>> {
    let begins_none = begun_by(kind).is_empty();
    let no_thread = begins_none.then(|| compile(NO_THREAD, SeccompAction::Allow, ABSENT));
    // The list comes last: few lists let a thread take one more filter.
    no_thread.into_iter().chain([filter_of_list(&of(kind))]).collect()
}

/// The same of the process while it starts.
pub fn filters_of_start() -> io::Result<Vec<Filter>> {
    Ok(vec![compile(NO_PROCESS, SeccompAction::Allow, ABSENT)?, filter_of_list(&of_start())?])
}

fn filter_of_list(calls: &[Call]) -> io::Result<Filter> {
    // The calls that the other filter answers.
    let all = merge(calls.iter().chain(NO_THREAD).copied());
    compile(&all, SeccompAction::Trap, SeccompAction::Allow)
}

fn compile(calls: &[Call], others: SeccompAction, these: SeccompAction) -> io::Result<Filter> {
    let rules = calls.iter().map(|call| Ok((call.number, call.rules()?))).collect::<Result<_, BackendError>>();
    let unsupported = |_| io::Error::from(io::ErrorKind::Unsupported);
    let arch = std::env::consts::ARCH.try_into().map_err(unsupported)?;
    let filter = rules.and_then(|rules| SeccompFilter::new(rules, others, these, arch));
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    Ok(program.iter().map(|instruction| (instruction.code, instruction.jt, instruction.jf, instruction.k)).collect())
}

/// The name of a call, if some list has it.
pub fn name(number: i64) -> Option<&'static str> {
    of_start().iter().find(|call| call.number == number).map(Call::name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_shm::{RefusedCalls, limit_calls};
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use rustix::thread::set_no_new_privs;
    use std::fs::OpenOptions;
    use std::process::Command;

    /// Runs on a thread with a kind's filters, as in a router. The thread's end is theirs.
    fn filtered<T: Send + 'static>(kind: ThreadKind, body: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = std::thread::spawn(move || {
            RefusedCalls::hear().unwrap();
            set_no_new_privs(true).unwrap();
            for program in filters_of_start().unwrap().into_iter().chain(filters(kind).unwrap()) {
                limit_calls(&program).unwrap();
            }
            body()
        });
        thread.join().unwrap()
    }

    fn packets() -> Result<(), Errno> {
        socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None).map(drop)
    }

    fn local() -> Result<(), Errno> {
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map(drop)
    }

    const REFUSED: Option<i32> = Some(libc::EPERM);
    const ABSENT: Option<i32> = Some(libc::ENOSYS);

    fn errno<T>(result: io::Result<T>) -> Option<i32> {
        result.err().and_then(|error| error.raw_os_error())
    }

    #[test]
    fn every_kind_goes_on_with_its_filter_and_begins_no_process() {
        for kind in ThreadKind::ALL {
            let (read, executed, other) = filtered(kind, || {
                let status = std::fs::read_to_string("/proc/thread-self/status");
                (status.map(|text| text.contains("\nSeccomp:\t2")), errno(Command::new("/bin/true").spawn()), packets())
            });
            assert!(read.unwrap(), "{kind:?}");
            assert_eq!((executed, other), (ABSENT, Err(Errno::PERM)), "{kind:?}");
        }
    }

    #[test]
    fn each_kind_has_what_it_needs_and_not_what_others_need() {
        let make = |name: &'static str| {
            move || {
                let path = std::env::temp_dir().join(format!("ff-calls-{name}-{}", std::process::id()));
                let made = errno(OpenOptions::new().write(true).create(true).truncate(true).open(&path));
                let removed = errno(std::fs::remove_file(&path));
                (made, removed, local(), errno(std::thread::Builder::new().spawn(|| {}).map(|thread| thread.join())))
            }
        };
        let no_socket = Err(Errno::PERM);
        assert_eq!(filtered(ThreadKind::Control, make("control")), (None, None, Ok(()), None));
        assert_eq!(filtered(ThreadKind::Store, make("store")), (None, None, no_socket, ABSENT));
        assert_eq!(filtered(ThreadKind::Peers, make("peers")), (REFUSED, REFUSED, Ok(()), ABSENT));
        assert_eq!(filtered(ThreadKind::Worker, make("worker")), (REFUSED, REFUSED, Ok(()), None));
        assert_eq!(filtered(ThreadKind::CopyThread, make("copy")), (REFUSED, REFUSED, no_socket, ABSENT));
    }

    /// A program's answer to a call: as the kernel runs it, for the instructions that these
    /// programs have.
    fn answer(program: &[FilterInstruction], number: i64, arguments: [u64; 6]) -> u32 {
        // struct seccomp_data: the number, the processor (AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64),
        // the place, the arguments.
        let processor: u32 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
        let mut data = vec![number as u32, processor, 0, 0];
        data.extend(arguments.iter().flat_map(|argument| [*argument as u32, (argument >> 32) as u32]));
        let (mut at, mut value) = (0, 0);
        loop {
            let (code, jt, jf, k) = program[at];
            at += 1;
            let jump = |is: bool| usize::from(if is { jt } else { jf });
            match code {
                0x20 => value = data[k as usize / 4],
                0x54 => value &= k,
                0x05 => at += k as usize,
                0x15 => at += jump(value == k),
                0x25 => at += jump(value > k),
                0x35 => at += jump(value >= k),
                0x06 => return k,
                _ => panic!("instruction {code:#x}"),
            }
        }
    }

    /// Whether a thread of this kind may make a call with such first arguments.
    fn may(kind: ThreadKind, number: i64, arguments: [i32; 3]) -> bool {
        let [a, b, c] = arguments.map(|argument| argument as u32 as u64);
        let programs = filters_of_start().unwrap().into_iter().chain(filters(kind).unwrap());
        programs
            .into_iter()
            .all(|program| answer(&program, number, [a, b, c, 0, 0, 0]) == u32::from(SeccompAction::Allow))
    }

    #[test]
    fn no_kind_has_what_no_router_needs() {
        let never = [
            libc::SYS_bpf,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_init_module,
            libc::SYS_io_uring_setup,
            libc::SYS_keyctl,
            libc::SYS_kexec_load,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_open_by_handle_at,
            libc::SYS_perf_event_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_reboot,
            libc::SYS_setns,
            libc::SYS_setuid,
            libc::SYS_unshare,
        ];
        for kind in ThreadKind::ALL {
            assert!(never.iter().all(|&number| !may(kind, number, [0; 3])), "{kind:?}");
            assert!(may(kind, libc::SYS_read, [0; 3]) && may(kind, libc::SYS_rt_sigreturn, [0; 3]));
            let holds = begun_by(kind)
                .iter()
                .chain([&kind])
                .any(|&kind| kind == ThreadKind::Freezer || begun_by(kind).contains(&ThreadKind::Freezer));
            assert_eq!(may(kind, libc::SYS_ptrace, [libc::PTRACE_SEIZE as i32, 1, 0]), holds, "{kind:?}");
            assert!(!may(kind, libc::SYS_ptrace, [libc::PTRACE_POKETEXT as i32, 1, 0]), "{kind:?}");
        }
    }

    #[test]
    fn arguments_count_where_a_list_says_so() {
        use libc::{
            AF_INET, AF_NETLINK, AF_PACKET, AF_UNIX, CLONE_THREAD, CLONE_VM, O_CLOEXEC, O_CREAT, O_RDWR, O_WRONLY,
        };
        for kind in ThreadKind::ALL {
            for call in [libc::SYS_mmap, libc::SYS_mprotect] {
                assert!(may(kind, call, [0, 4096, libc::PROT_READ | libc::PROT_WRITE]), "{kind:?}");
                assert!(!may(kind, call, [0, 4096, libc::PROT_READ | libc::PROT_EXEC]), "{kind:?}");
            }
            assert!(!may(kind, libc::SYS_clone, [CLONE_VM, 0, 0]), "{kind:?}");
            let own = std::process::id() as i32;
            assert!(may(kind, libc::SYS_tgkill, [own, own, 6]) && !may(kind, libc::SYS_tgkill, [1, 1, 9]), "{kind:?}");
            assert!(may(kind, libc::SYS_prctl, [libc::PR_SET_NAME, 0, 0]), "{kind:?}");
            assert!(!may(kind, libc::SYS_prctl, [libc::PR_SET_DUMPABLE, 1, 0]), "{kind:?}");
            for call in [libc::SYS_prlimit64, libc::SYS_sched_setattr, libc::SYS_sched_setaffinity] {
                assert!(may(kind, call, [0; 3]) && !may(kind, call, [1, 0, 0]), "{kind:?}");
            }
            assert!(
                [AF_PACKET, AF_NETLINK].iter().all(|&family| !may(kind, libc::SYS_socket, [family, 0, 0])),
                "{kind:?}"
            );
        }
        assert!(may(ThreadKind::Worker, libc::SYS_clone, [CLONE_VM | CLONE_THREAD, 0, 0]));
        assert!(may(ThreadKind::Worker, libc::SYS_ioctl, [3, 0xc020_aa00_u32 as i32, 0]));
        assert!(!may(ThreadKind::Worker, libc::SYS_ioctl, [3, libc::TIOCSTI as i32, 0]));
        assert!([AF_UNIX, AF_INET].iter().all(|&family| may(ThreadKind::Worker, libc::SYS_socket, [family, 0, 0])));
        let opens = |kind, flags| may(kind, libc::SYS_openat, [libc::AT_FDCWD, 0, flags]);
        for kind in [ThreadKind::Worker, ThreadKind::Peers, ThreadKind::CopyThread, ThreadKind::SlowPath] {
            assert!(opens(kind, O_CLOEXEC));
            assert!([O_RDWR, O_WRONLY, O_CREAT].iter().all(|&flags| !opens(kind, flags)), "{kind:?}");
        }
        assert!(opens(ThreadKind::Identify, O_RDWR) && opens(ThreadKind::Store, O_RDWR | O_CREAT));
    }

    #[test]
    fn another_processor_s_calls_end_the_process() {
        let program = filters(ThreadKind::Main).unwrap().pop().unwrap();
        let foreign: Vec<_> = program
            .iter()
            .map(|&(code, jt, jf, k)| (code, jt, jf, k ^ u32::from(code == 0x15 && k > 1 << 30)))
            .collect();
        assert_eq!(answer(&foreign, libc::SYS_read, [0; 6]), u32::from(SeccompAction::KillProcess));
    }

    #[test]
    fn who_begins_a_thread_has_what_that_one_needs() {
        for kind in ThreadKind::ALL {
            let all = of(kind);
            let has = |wanted: &Call| all.iter().any(|call| call.number == wanted.number && call.when <= wanted.when);
            assert!(begun_by(kind).iter().all(|&begun| of(begun).iter().all(has)), "{kind:?}");
            let start = of_start();
            assert!(all.iter().all(|call| start.iter().any(|other| other.number == call.number)), "{kind:?}");
        }
    }
}
