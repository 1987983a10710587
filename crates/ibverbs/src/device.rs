//! The device list: a device for each vNIC of the container, `freeflow0`, `freeflow1`, …, while a router answers.
//!
//! Invariant: a `Device` lives while the list that named it, a context opened from it, or
//! [`CURRENT`] holds a reference.
use crate::boundary::{Outcome, code, number, pointer, set_errno};
use crate::fork;
use freeflow_abi::{IBV_NODE_CA, IBV_TRANSPORT_IB, errno_of, gid_to_c, ibv_context, ibv_device, ibv_gid, verbs_device};
use freeflow_client::{ConnectError, OwnMemory, Session, VNIC_COUNT_MAX};
use freeflow_verbs::VerbsError;
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};

/// Target of `verbs_device.ops`: readable, and no vendor's.
static NO_PROVIDER: [u64; 64] = [0; 64];

/// The devices of the live sessions, if they were asked for.
static CURRENT: Mutex<[Option<Reference>; VNIC_COUNT_MAX]> = Mutex::new([const { None }; VNIC_COUNT_MAX]);
/// A device's name, before its number.
const NAME: &str = "freeflow";

/// A device as C sees it, and the session behind it.
#[repr(C)]
pub(crate) struct Device {
    c: UnsafeCell<verbs_device>,
    session: Arc<Session>,
    /// Of the vNIC among those of its container.
    number: usize,
    references: AtomicUsize,
}

/// One counted reference.
struct Reference(*mut Device);

// SAFETY: a device is reached from any thread; its counter is atomic and the rest is read only.
unsafe impl Send for Reference {}

impl Device {
    /// # Safety
    /// `device` came from the device list and is still referred to.
    pub unsafe fn from_c<'a>(device: *mut ibv_device) -> &'a Self {
        // SAFETY: `verbs_device` begins with `ibv_device` and `Device` with `verbs_device`.
        unsafe { &*device.cast::<Self>() }
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Its directory in sysfs.
    fn directory(number: usize) -> String {
        format!("/sys/class/infiniband/{NAME}{number}")
    }

    fn create(number: usize, session: Arc<Session>) -> *mut Self {
        // SAFETY: integers and pointers only; all zeroes are valid.
        let mut c: verbs_device = unsafe { std::mem::zeroed() };
        c.device.node_type = IBV_NODE_CA;
        c.device.transport_type = IBV_TRANSPORT_IB;
        set_text(&mut c.device.name, &format!("{NAME}{number}"));
        set_text(&mut c.device.dev_name, &format!("uverbs{number}"));
        set_text(&mut c.device.dev_path, &format!("/sys/class/infiniband_verbs/uverbs{number}"));
        set_text(&mut c.device.ibdev_path, &Self::directory(number));
        c.ops = NO_PROVIDER.as_ptr().cast();
        Box::into_raw(Box::new(Self { c: UnsafeCell::new(c), session, number, references: AtomicUsize::new(1) }))
    }
}

/// Takes one more reference.
///
/// # Safety
/// The device is referred to.
pub(crate) unsafe fn hold(device: *mut ibv_device) {
    // SAFETY: this function's contract.
    unsafe { Device::from_c(device) }.references.fetch_add(1, Ordering::Relaxed);
}

/// Gives a reference back.
///
/// # Safety
/// The caller owned that reference.
pub(crate) unsafe fn release(device: *mut ibv_device) {
    // SAFETY: this function's contract.
    let last = unsafe { Device::from_c(device) }.references.fetch_sub(1, Ordering::AcqRel) == 1;
    if last {
        // SAFETY: made by `Box::into_raw` in `create`, and nobody refers to it any more.
        drop(unsafe { Box::from_raw(device.cast::<Device>()) });
    }
}

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = {
    extern "C" fn on_load() {
        freeflow_remap::note_stderr();
    }
    on_load
};

/// `off`: all requests go through the router. For debugging.
const DIRECT_VARIABLE: &str = "FREEFLOW_DIRECT";

fn set_text(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (to, from) in to.iter_mut().zip(text.bytes().take(room)) {
        *to = from as c_char;
    }
}

fn allow_direct(session: &Session) {
    if std::env::var_os(DIRECT_VARIABLE).is_none_or(|value| value != "off") {
        // SAFETY: what `ibv_reg_mr`, `ibv_post_send` and `ibv_post_recv` demand of their callers.
        session.allow_direct(unsafe { OwnMemory::promised() });
    }
}

/// Says once on stderr why there is no session and what to do. The errno of that.
fn complain(error: &ConnectError) -> c_int {
    static COMPLAINED: Once = Once::new();
    COMPLAINED.call_once(|| eprintln!("freeflow: {error}"));
    match error {
        ConnectError::NoRouter { .. } => libc::ENODEV,
        ConnectError::Version { .. } => errno_of(VerbsError::VersionMismatch),
        ConnectError::Refused { error, .. } => errno_of(*error),
        ConnectError::Broken { .. } => libc::EIO,
    }
}

/// This process's session with its first vNIC.
pub(crate) fn session_or_complain() -> Result<Arc<Session>, c_int> {
    fork::watch();
    Session::current().inspect(|session| allow_direct(session)).map_err(|error| complain(&error))
}

/// The devices of this process, each with a reference for the caller; at least one.
pub(crate) fn current_devices() -> Result<Vec<*mut ibv_device>, c_int> {
    fork::watch();
    let (sessions, refused) = Session::all();
    let refused = refused.as_ref().map(complain);
    if sessions.is_empty() {
        return Err(refused.unwrap_or(libc::ENODEV));
    }
    Ok(sessions.into_iter().map(|(number, session)| device_of(number, session)).collect())
}

/// With a reference for the caller.
fn device_of(number: usize, session: Arc<Session>) -> *mut ibv_device {
    allow_direct(&session);
    let current = &mut CURRENT.lock().unwrap_or_else(PoisonError::into_inner)[number];
    if let Some(Reference(device)) = current {
        // SAFETY: `CURRENT` holds a reference.
        if Arc::ptr_eq(unsafe { &*device.cast_const() }.session(), &session) {
            // SAFETY: the same.
            unsafe { hold(device.cast()) };
            return device.cast();
        }
    }
    let device = Device::create(number, session);
    if let Some(Reference(old)) = current.replace(Reference(device)) {
        // SAFETY: `CURRENT`'s reference, taken out of it.
        unsafe { release(old.cast()) };
    }
    // SAFETY: just put into `CURRENT`, which holds a reference.
    unsafe { hold(device.cast()) };
    device.cast()
}

/// `ibv_get_device_list(3)`: the vNICs of the container, or NULL with ENODEV and a line on stderr if
/// no router answers.
///
/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let (mut refused, mut found) = (0, 0);
    let list = pointer(|| {
        let mut devices = current_devices().map_err(|errno| {
            refused = errno;
            VerbsError::DeviceFatal
        })?;
        found = devices.len() as c_int;
        devices.push(ptr::null_mut());
        Ok(Box::into_raw(devices.into_boxed_slice()).cast::<*mut ibv_device>())
    });
    if refused != 0 {
        set_errno(refused);
    }
    if !count.is_null() {
        // SAFETY: the C contract.
        unsafe { *count = if list.is_null() { 0 } else { found } };
    }
    list
}

/// `ibv_free_device_list(3)`.
///
/// # Safety
/// `list` came from [`ibv_get_device_list`], once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    let _ = code(|| {
        // SAFETY: made by `Box::into_raw` with a null at its end; each entry before that owns a
        // reference.
        unsafe {
            let count = (0..).take_while(|at| !(*list.add(*at)).is_null()).count();
            let list = Box::from_raw(ptr::slice_from_raw_parts_mut(list, count + 1));
            list.iter().take(count).for_each(|device| release(*device));
        }
        Ok(())
    });
}

/// `ibv_get_device_name(3)`.
///
/// # Safety
/// `device` is a device of the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the C contract.
    unsafe { (&raw const (*device).name).cast() }
}

/// `ibv_get_device_guid(3)`: network byte order.
///
/// # Safety
/// `device` is a device of the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: the C contract.
    unsafe { Device::from_c(device) }.session().device().node_guid.to_be()
}

/// `ibv_get_device_index(3)`: there is no kernel device, so -1.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

/// The GID at an index of a port; `InvalidArgument` beyond the table.
fn gid_at(session: &Session, port: u32, index: u32) -> Outcome<ibv_gid> {
    let length = session.device().port.gid_table_length;
    if port != 1 || index >= length {
        return Err(VerbsError::InvalidArgument);
    }
    Ok(session.gids().get(index as usize).map_or_else(ibv_gid::default, |gid| gid_to_c(*gid)))
}

/// `ibv_query_gid(3)`. Empty entries of the table are zero.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
    number(|| {
        let index = u32::try_from(index).map_err(|_| VerbsError::InvalidArgument)?;
        // SAFETY: the C contract.
        unsafe { *gid = gid_at(crate::context::session(context), u32::from(port), index)? };
        Ok(0)
    })
}

/// `ibv_query_gid_type` (private to rdma-core, but ibv_devinfo and pyverbs call it): 1, RoCE v2.
///
/// # Safety
/// The pointers are valid.
pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    gid_type: *mut c_uint,
) -> c_int {
    number(|| {
        // SAFETY: the C contract.
        unsafe {
            gid_at(crate::context::session(context), u32::from(port), index)?;
            *gid_type = freeflow_abi::IBV_GID_TYPE_SYSFS_ROCE_V2;
        }
        Ok(0)
    })
}

mod gid_table {
    use super::{Device, Outcome, VerbsError, code, ibv_context, set_errno};
    use crate::boundary::guarded;
    use freeflow_abi::{IBV_GID_TYPE_ROCE_V2, copy_prefix, errno_of, gid_to_c, ibv_gid_entry};
    use freeflow_client::Session;
    use freeflow_verbs::Gid;

    /// Index of the network interface with a GID's address, which sysfs names; 0 for none, as in
    /// rdma-core.
    fn interface_of(device: &Device, index: usize) -> u32 {
        let port = format!("{}/ports/1", Device::directory(device.number));
        let Ok(name) = std::fs::read_to_string(format!("{port}/gid_attrs/ndevs/{index}")) else { return 0 };
        let Ok(name) = std::ffi::CString::new(name.trim_end()) else { return 0 };
        // SAFETY: a C string.
        unsafe { libc::if_nametoindex(name.as_ptr()) }
    }

    /// # Safety
    /// `context` is open.
    unsafe fn device<'a>(context: *mut ibv_context) -> &'a Device {
        // SAFETY: this function's contract: a context holds a reference to its device.
        unsafe { Device::from_c((*context).device) }
    }

    fn entry(device: &Device, index: usize, gid: Gid) -> ibv_gid_entry {
        ibv_gid_entry {
            gid: gid_to_c(gid),
            gid_index: index as u32,
            port_num: 1,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ndev_ifindex: interface_of(device, index),
        }
    }

    fn present(session: &Session) -> impl Iterator<Item = (usize, Gid)> {
        session.gids().iter().copied().enumerate().filter(|(_, gid)| !gid.is_zero())
    }

    /// `ibv_query_gid_ex(3)`: 0 or an errno; ENODATA for an empty entry.
    ///
    /// # Safety
    /// The pointers are valid, `to` for `entry_size` bytes.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn _ibv_query_gid_ex(
        context: *mut ibv_context,
        port: u32,
        index: u32,
        to: *mut ibv_gid_entry,
        flags: u32,
        entry_size: usize,
    ) -> i32 {
        let mut empty = false;
        let outcome = code(|| {
            // SAFETY: the C contract.
            let session = unsafe { crate::context::session(context) };
            if flags != 0 || port != 1 || index >= session.device().port.gid_table_length {
                return Err(VerbsError::InvalidArgument);
            }
            let Some((_, gid)) = present(session).find(|(at, _)| *at == index as usize) else {
                empty = true;
                return Ok(());
            };
            // SAFETY: the C contract.
            unsafe { copy_prefix(&entry(device(context), index as usize, gid), to, entry_size) };
            Ok(())
        });
        if empty {
            set_errno(libc::ENODATA);
            return libc::ENODATA;
        }
        outcome
    }

    /// `ibv_query_gid_table(3)`: how many entries were written, or a negated errno.
    ///
    /// # Safety
    /// The pointers are valid, `entries` for `max_entries` times `entry_size` bytes.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        entry_size: usize,
    ) -> isize {
        let outcome: Outcome<isize> = guarded(|| {
            // SAFETY: the C contract.
            let session = unsafe { crate::context::session(context) };
            if flags != 0 || entry_size == 0 || present(session).count() > max_entries {
                return Err(VerbsError::InvalidArgument);
            }
            let mut count = 0;
            for (index, gid) in present(session) {
                // SAFETY: the C contract; `count` stays below `max_entries`.
                unsafe {
                    let to = entries.byte_add(count * entry_size);
                    copy_prefix(&entry(device(context), index, gid), to, entry_size);
                }
                count += 1;
            }
            Ok(count as isize)
        });
        outcome.unwrap_or_else(|error| {
            set_errno(errno_of(error));
            -(errno_of(error) as isize)
        })
    }
}

/// The only partition: the default one, full member.
const PKEY_DEFAULT: u16 = 0xffff;

/// `ibv_query_pkey(3)`: network byte order.
///
/// # Safety
/// The pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(_context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int {
    number(|| {
        if port != 1 || index != 0 {
            return Err(VerbsError::InvalidArgument);
        }
        // SAFETY: the C contract.
        unsafe { *pkey = PKEY_DEFAULT.to_be() };
        Ok(0)
    })
}

/// `ibv_get_pkey_index(3)`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    number(|| if port == 1 && u16::from_be(pkey) == PKEY_DEFAULT { Ok(0) } else { Err(VerbsError::InvalidArgument) })
}
