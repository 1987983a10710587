//! Pages that are not there: a segment can be mapped so that this process never allocates one of
//! its pages.
//!
//! The process that first touches a page of shared memory has it charged to its memory cgroup. For a segment
//! after [`crate::Segment::refuse_missing`] the kernel raises SIGBUS here instead (userfaultfd with
//! UFFD_FEATURE_SIGBUS), and the copy, read, write or atomic operation answers
//! [`crate::AccessError::Missing`]. Pages that are present cost nothing more than before; a fault
//! that only fills in this process' page table happens as for any mapping.
//!
//! An access runs in a *guarded call*: the trampoline below saves the callee-saved registers and
//! its stack pointer in a thread-local [`Frame`] with the address ranges in question. The SIGBUS
//! handler that finds a fault in one of them resumes at the trampoline's second entry, which
//! returns "missing". What is abandoned so is one `extern "C"` function that copies bytes: no
//! destructor, no lock, no allocation.
//!
//! Only on x86-64; elsewhere, and where the kernel has no userfaultfd, [`is_supported`] is false.
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

/// `enum` values of `linux/userfaultfd.h`, which libc does not have.
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const UFFD_FEATURE_SIGBUS: u64 = 1 << 7;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
/// `_IOWR(0xaa, 0x3f, 24 bytes)` and `_IOWR(0xaa, 0, 32 bytes)`.
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;

#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdRegister {
    start: u64,
    bytes: u64,
    mode: u64,
    ioctls: u64,
}

/// The descriptor of this process; its end would end all registrations, so it stays open.
fn userfault() -> Result<&'static OwnedFd, i32> {
    static USERFAULT: OnceLock<Result<OwnedFd, i32>> = OnceLock::new();
    USERFAULT.get_or_init(open).as_ref().map_err(|&errno| errno)
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

fn open() -> Result<OwnedFd, i32> {
    if !cfg!(target_arch = "x86_64") {
        return Err(libc::ENOSYS);
    }
    // Faults of system calls on such memory fail with EFAULT, so that no privilege is needed.
    let flags = libc::O_CLOEXEC | UFFD_USER_MODE_ONLY;
    // SAFETY: the call takes a number and gives a descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 {
        return Err(errno());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let features = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MISSING_SHMEM;
    let mut api = UffdApi { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: `api` has the layout that the request names, and is ours to write.
    if unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API as _, &raw mut api) } != 0 {
        return Err(errno());
    }
    Ok(fd)
}

/// Whether the kernel can refuse missing pages.
pub fn refuses_missing_pages() -> io::Result<()> {
    userfault().map(|_| ()).map_err(io::Error::from_raw_os_error)
}

/// From now on no access of this process to the mapped range allocates a page.
pub(crate) fn refuse(start: usize, bytes: usize) -> io::Result<()> {
    let fd = userfault().map_err(io::Error::from_raw_os_error)?;
    let mode = UFFDIO_REGISTER_MODE_MISSING;
    let mut register = UffdRegister { start: start as u64, bytes: bytes as u64, mode, ioctls: 0 };
    // SAFETY: `register` has the layout that the request names, and is ours to write. The range is
    // a mapping of a segment's own, whose accesses from now on are guarded calls.
    match unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_REGISTER as _, &raw mut register) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A page of the range is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing;

/// An address range of this process.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AddressRange {
    pub start: usize,
    pub bytes: usize,
}

impl AddressRange {
    pub const NONE: Self = Self { start: 0, bytes: 0 };

    fn holds(&self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{guarded, recover};

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use super::{AddressRange, Missing};
    use std::cell::Cell;
    use std::ffi::c_void;
    use std::sync::atomic::{Ordering, compiler_fence};

    /// The guarded call that this thread is in.
    #[repr(C)]
    struct Frame {
        /// Of the trampoline, while a guarded call runs; else 0.
        stack_pointer: Cell<usize>,
        ranges: Cell<[AddressRange; 2]>,
    }

    thread_local! {
        // Const, and without a destructor: a signal handler may look at it.
        static FRAME: Frame = const {
            Frame { stack_pointer: Cell::new(0), ranges: Cell::new([AddressRange::NONE; 2]) }
        };
    }

    // freeflow_guarded_call(body, argument, &stack_pointer): 0, or 1 if it was given up. Six
    // callee-saved registers and the third argument are on the stack, so that it is aligned for the
    // call; their places are what the second entry relies on.
    std::arch::global_asm!(
        ".p2align 4",
        ".hidden freeflow_guarded_call",
        ".globl freeflow_guarded_call",
        ".type freeflow_guarded_call, @function",
        "freeflow_guarded_call:",
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdx",
        "mov [rdx], rsp",
        "mov rax, rdi",
        "mov rdi, rsi",
        "call rax",
        "xor eax, eax",
        "2:",
        "pop rdx",
        "mov qword ptr [rdx], 0",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        ".hidden freeflow_guarded_recovery",
        ".globl freeflow_guarded_recovery",
        "freeflow_guarded_recovery:",
        "mov eax, 1",
        "jmp 2b",
        ".size freeflow_guarded_call, . - freeflow_guarded_call",
    );

    unsafe extern "C" {
        fn freeflow_guarded_call(
            body: unsafe extern "C" fn(*mut c_void),
            argument: *mut c_void,
            stack_pointer: *mut usize,
        ) -> i32;
        fn freeflow_guarded_recovery();
    }

    /// Runs `body`, which is given up at its first access to a missing page of one of the ranges.
    ///
    /// # Safety
    /// `body(argument)` is sound, and stays so wherever it ends: it holds nothing that has a
    /// destructor, takes no lock, does not unwind and makes no guarded call.
    #[inline]
    pub(crate) unsafe fn guarded<T>(
        body: unsafe extern "C" fn(*mut c_void),
        argument: &mut T,
        ranges: [AddressRange; 2],
    ) -> Result<(), Missing> {
        FRAME.with(|frame| {
            frame.ranges.set(ranges);
            // SeqCst, compiler only; partner: the handler, on this thread. The ranges stand before
            // the call is marked as one.
            compiler_fence(Ordering::SeqCst);
            // SAFETY: this function's contract; the trampoline keeps to the C calling convention, at
            // both of its entries.
            match unsafe { freeflow_guarded_call(body, (&raw mut *argument).cast(), frame.stack_pointer.as_ptr()) } {
                0 => Ok(()),
                _ => Err(Missing),
            }
        })
    }

    /// In the SIGBUS handler: has the thread go on at the end of its guarded call, if the fault is
    /// one of those. Async-signal-safe.
    pub(crate) fn recover(address: usize, context: *mut c_void) -> bool {
        let stack_pointer = FRAME.with(|frame| {
            let inside = frame.ranges.get().iter().any(|range| range.holds(address));
            if inside { frame.stack_pointer.get() } else { 0 }
        });
        if stack_pointer == 0 {
            return false;
        }
        const DIRECTION_FLAG: i64 = 1 << 10;
        // SAFETY: the kernel gives the interrupted thread's context, which nobody else has; the
        // thread is in a guarded call, whose stack is as the trampoline left it at `stack_pointer`.
        unsafe {
            let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            registers[libc::REG_RSP as usize] = stack_pointer as i64;
            registers[libc::REG_RIP as usize] = freeflow_guarded_recovery as *const () as i64;
            // A copy from its end may have been under way.
            registers[libc::REG_EFL as usize] &= !DIRECTION_FLAG;
        }
        true
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod other {
    use super::{AddressRange, Missing};
    use std::ffi::c_void;

    /// # Safety
    /// `body(argument)` is sound.
    pub(crate) unsafe fn guarded<T>(
        body: unsafe extern "C" fn(*mut c_void),
        argument: &mut T,
        _: [AddressRange; 2],
    ) -> Result<(), Missing> {
        // SAFETY: this function's contract.
        unsafe { body((&raw mut *argument).cast()) };
        Ok(())
    }

    pub(crate) fn recover(_: usize, _: *mut c_void) -> bool {
        false
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use other::{guarded, recover};
