//! Refusing system calls to a thread, and hearing of those that were refused.
//!
//! A filter's action for a call that it refuses is SECCOMP_RET_TRAP: the call is not made, and the
//! handler below has it answer EPERM. So the caller fails as for any lack of rights, and the
//! process knows of it, whatever the kernel logs.
use rustix::pipe::{PipeFlags, pipe_with};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

/// One instruction of a filter, as in linux/filter.h: operation, jumps, operand.
pub type FilterInstruction = (u16, u8, u8, u32);

/// asm-generic/siginfo.h: a filter's SIGSYS, and not one that somebody sent.
const SYS_SECCOMP: libc::c_int = 1;
/// A thread's name with its zero.
const NAME_BYTES: usize = 16;
const MESSAGE_BYTES: usize = 8 + NAME_BYTES;

/// Both ends of the pipe, from the handler to [`RefusedCalls`]; it stays open.
static PIPE: OnceLock<(OwnedFd, OwnedFd)> = OnceLock::new();

/// The calling thread, and those that it begins later, make a system call only if this filter and
/// those before it let it pass. The thread may gain no privileges. Errors: EINVAL, ENOSYS: the
/// kernel has no filters.
pub fn limit_calls(filter: &[FilterInstruction]) -> io::Result<()> {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        // There `refuse` does not know the registers.
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    let mut program: Vec<libc::sock_filter> =
        filter.iter().map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k }).collect();
    let len = u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    let install = |flags: libc::c_ulong| {
        // SAFETY: the program lives during the call, and the kernel copies it.
        match unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // Before Linux 5.16 a filter without this flag turns off the processor's speculation of stores
    // for the thread: dear where much is copied, and meant for processes that run code of others.
    // Before 4.17 the flag is unknown.
    match install(libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => install(0),
        other => other,
    }
}

/// A system call that a filter of this process refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusedCall {
    pub thread: String,
    pub number: i64,
}

/// System calls that filters refuse in this process from [`RefusedCalls::hear`] on. Readable while
/// there are some. A pipe's capacity bounds them.
#[derive(Clone, Copy)]
pub struct RefusedCalls(BorrowedFd<'static>);

impl RefusedCalls {
    /// Before the first filter. Further calls give the same pipe.
    pub fn hear() -> io::Result<Self> {
        if PIPE.get().is_none() {
            let _ = PIPE.set(pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?);
            install()?;
        }
        PIPE.get().map(|(read, _)| Self(read.as_fd())).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub fn take(&self) -> Option<RefusedCall> {
        let mut message = [0; MESSAGE_BYTES];
        // A message is written and read whole.
        if rustix::io::read(self.0, &mut message).ok()? != MESSAGE_BYTES {
            return None;
        }
        let (number, name) = message.split_first_chunk()?;
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        Some(RefusedCall { thread: String::from_utf8_lossy(name).into_owned(), number: i64::from_le_bytes(*number) })
    }
}

impl AsFd for RefusedCalls {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0
    }
}

fn install() -> io::Result<()> {
    // SAFETY: all zero is a valid `sigaction`; the mask is then empty.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `handle` has the signature that SA_SIGINFO asks for and does only what a handler may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs on the thread whose call was refused. No allocation, no lock, no errno: the calls that it
/// makes itself don't fail but for the write, which rustix makes directly. Invariant: every filter
/// lets prctl, write and rt_sigreturn pass.
extern "C" fn handle(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo with SA_SIGINFO.
    if unsafe { (*info).si_code } != SYS_SECCOMP {
        return;
    }
    // SAFETY: the kernel gives the interrupted thread's context, which nobody else has.
    let number = unsafe { refuse(&mut (*context.cast::<libc::ucontext_t>()).uc_mcontext) };
    let mut message = [0_u8; MESSAGE_BYTES];
    let (head, name) = message.split_at_mut(8);
    head.copy_from_slice(&number.to_le_bytes());
    // SAFETY: the kernel writes NAME_BYTES there at most.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    if let Some((_, write)) = PIPE.get() {
        // A full pipe has notifications enough.
        let _ = rustix::io::write(write, &message);
    }
}

/// The call answers EPERM. Gives its number.
#[cfg(target_arch = "x86_64")]
fn refuse(context: &mut libc::mcontext_t) -> i64 {
    // The kernel has put the number back to where the answer goes.
    let answer = &mut context.gregs[libc::REG_RAX as usize];
    std::mem::replace(answer, -i64::from(libc::EPERM))
}

#[cfg(target_arch = "aarch64")]
fn refuse(context: &mut libc::mcontext_t) -> i64 {
    context.regs[0] = -i64::from(libc::EPERM) as u64;
    context.regs[8] as i64
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn refuse(_: &mut libc::mcontext_t) -> i64 {
    -1
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: u16 = 0x20;
    const JUMP_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ALLOW: u32 = 0x7fff_0000;
    const TRAP: u32 = 0x0003_0000;

    #[test]
    fn a_call_that_is_refused_answers_eperm_and_is_heard_of() {
        let refused = RefusedCalls::hear().unwrap();
        let body = move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            let number = libc::SYS_sethostname;
            limit_calls(&[
                (LOAD, 0, 0, 0),
                (JUMP_EQUAL, 0, 1, number as u32),
                (RETURN, 0, 0, TRAP),
                (RETURN, 0, 0, ALLOW),
            ])
            .unwrap();
            // SAFETY: without the filter it would fail, too: the address is none.
            let answer = unsafe { libc::sethostname(std::ptr::null(), 1) };
            let error = io::Error::last_os_error().raw_os_error();
            assert_eq!((answer, error), (-1, Some(libc::EPERM)));
            assert!(std::fs::read_to_string("/proc/thread-self/status").unwrap().contains("\nSeccomp:\t2\n"));
            number
        };
        let number = std::thread::Builder::new().name("filtered".into()).spawn(body).unwrap().join().unwrap();
        assert_eq!(refused.take(), Some(RefusedCall { thread: "filtered".into(), number }));
        assert_eq!(refused.take(), None);
        // This one is as it was: the address is none.
        // SAFETY: as above.
        unsafe { libc::sethostname(std::ptr::null(), 1) };
        assert_ne!(refused.take().map(|call| call.number), Some(number));
    }
}
