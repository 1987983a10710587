//! Reading sysfs, and translations of the kernel's structs, for programs and for the real
//! `librdmacm` above this library.
use core::ffi::{CStr, c_char, c_int};
use freeflow_abi::{
    IBV_SYSFS_PATH_MAX, ib_user_path_rec, ib_uverbs_ah_attr, ib_uverbs_qp_attr, ibv_ah_attr, ibv_gid, ibv_global_route,
    ibv_qp_attr, ibv_qp_cap, ibv_sa_path_rec,
};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where sysfs is: `$SYSFS_PATH` without slashes at its end (not in a set-user-ID program), else
/// `/sys`.
fn sysfs_path() -> &'static CStr {
    static PATH: OnceLock<CString> = OnceLock::new();
    PATH.get_or_init(|| {
        // SAFETY: the two calls have no preconditions.
        let trusted = unsafe { libc::getuid() == libc::geteuid() };
        let mut path = match std::env::var_os("SYSFS_PATH") {
            Some(path) if trusted => path.into_vec(),
            _ => b"/sys".to_vec(),
        };
        path.truncate(IBV_SYSFS_PATH_MAX);
        while path.last() == Some(&b'/') {
            path.pop();
        }
        CString::new(path).unwrap_or_default()
    })
}

/// The string stays valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    sysfs_path().as_ptr()
}

/// Reads once into `buffer`, drops one newline at the end and puts a NUL there. The count without
/// them, or none if the file can't be read or its text does not fit.
fn read_text(path: &Path, buffer: &mut [u8]) -> Option<usize> {
    let mut file = File::open(path).ok()?;
    let count = loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => break other.ok()?,
        }
    };
    match count.checked_sub(1) {
        None => Some(0),
        Some(last) if buffer[last] == b'\n' => {
            buffer[last] = 0;
            Some(last)
        }
        Some(_) => {
            *buffer.get_mut(count)? = 0;
            Some(count)
        }
    }
}

/// Reads `directory`/`file` as text into `buffer`: its length, or -1.
///
/// # Safety
/// The C contract: `directory` and `file` are C strings, `buffer` is valid for writes of `bytes`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    directory: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    bytes: usize,
) -> c_int {
    if directory.is_null() || file.is_null() || buffer.is_null() || bytes == 0 {
        return -1;
    }
    // SAFETY: the C contract: two C strings.
    let (directory, file) = unsafe { (CStr::from_ptr(directory), CStr::from_ptr(file)) };
    // As rdma-core joins them: a file that starts with a slash still lies below the directory.
    let mut path = directory.to_bytes().to_vec();
    path.push(b'/');
    path.extend_from_slice(file.to_bytes());
    // SAFETY: the C contract: `bytes` writable bytes, which nobody else uses during the call.
    let buffer = unsafe {
        core::ptr::write_bytes(buffer, 0, bytes);
        core::slice::from_raw_parts_mut(buffer.cast::<u8>(), bytes)
    };
    read_text(&PathBuf::from(OsStr::from_bytes(&path)), buffer)
        .and_then(|count| c_int::try_from(count).ok())
        .unwrap_or(-1)
}

fn ah_from_kernel(from: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: from.grh.dgid },
            flow_label: from.grh.flow_label,
            sgid_index: from.grh.sgid_index,
            hop_limit: from.grh.hop_limit,
            traffic_class: from.grh.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

/// # Safety
/// The C contract: both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_ah_attr_from_kern(to: *mut ibv_ah_attr, from: *const ib_uverbs_ah_attr) {
    // SAFETY: the C contract: both are valid.
    unsafe { *to = ah_from_kernel(&*from) };
}

/// Leaves `qp_state` and `rate_limit` as they are: the caller sets the state, the kernel's struct
/// has no rate.
///
/// # Safety
/// The C contract: both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_qp_attr_from_kern(to: *mut ibv_qp_attr, from: *const ib_uverbs_qp_attr) {
    // SAFETY: the C contract: both are valid.
    let (to, from) = unsafe { (&mut *to, &*from) };
    *to = ibv_qp_attr {
        qp_state: to.qp_state,
        cur_qp_state: from.cur_qp_state,
        path_mtu: from.path_mtu,
        path_mig_state: from.path_mig_state,
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qp_num,
        qp_access_flags: from.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: from.max_send_wr,
            max_recv_wr: from.max_recv_wr,
            max_send_sge: from.max_send_sge,
            max_recv_sge: from.max_recv_sge,
            max_inline_data: from.max_inline_data,
        },
        ah_attr: ah_from_kernel(&from.ah_attr),
        alt_ah_attr: ah_from_kernel(&from.alt_ah_attr),
        pkey_index: from.pkey_index,
        alt_pkey_index: from.alt_pkey_index,
        en_sqd_async_notify: from.en_sqd_async_notify,
        sq_draining: from.sq_draining,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port_num,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        alt_port_num: from.alt_port_num,
        alt_timeout: from.alt_timeout,
        rate_limit: to.rate_limit,
    };
}

fn path_from_kernel(from: &ib_user_path_rec) -> ibv_sa_path_rec {
    ibv_sa_path_rec {
        dgid: ibv_gid { raw: from.dgid },
        sgid: ibv_gid { raw: from.sgid },
        dlid: from.dlid,
        slid: from.slid,
        raw_traffic: from.raw_traffic.cast_signed(),
        flow_label: from.flow_label,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
        reversible: from.reversible.cast_signed(),
        numb_path: from.numb_path,
        pkey: from.pkey,
        sl: from.sl,
        mtu_selector: from.mtu_selector,
        mtu: from.mtu as u8,
        rate_selector: from.rate_selector,
        rate: from.rate,
        packet_life_time_selector: from.packet_life_time_selector,
        packet_life_time: from.packet_life_time,
        preference: from.preference,
    }
}

fn path_to_kernel(from: &ibv_sa_path_rec) -> ib_user_path_rec {
    ib_user_path_rec {
        dgid: from.dgid.raw,
        sgid: from.sgid.raw,
        dlid: from.dlid,
        slid: from.slid,
        raw_traffic: from.raw_traffic.cast_unsigned(),
        flow_label: from.flow_label,
        reversible: from.reversible.cast_unsigned(),
        mtu: u32::from(from.mtu),
        pkey: from.pkey,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
        numb_path: from.numb_path,
        sl: from.sl,
        mtu_selector: from.mtu_selector,
        rate_selector: from.rate_selector,
        rate: from.rate,
        packet_life_time_selector: from.packet_life_time_selector,
        packet_life_time: from.packet_life_time,
        preference: from.preference,
    }
}

/// # Safety
/// The C contract: both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_from_kern(to: *mut ibv_sa_path_rec, from: *const ib_user_path_rec) {
    // SAFETY: the C contract: both are valid.
    unsafe { *to = path_from_kernel(&*from) };
}

/// # Safety
/// The C contract: both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_to_kern(to: *mut ib_user_path_rec, from: *const ibv_sa_path_rec) {
    // SAFETY: the C contract: both are valid.
    unsafe { *to = path_to_kernel(&*from) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a file with `content` by `ibv_read_sysfs_file`, into a buffer of `bytes`.
    fn read(name: &str, content: &[u8], bytes: usize) -> (c_int, Vec<u8>) {
        let directory = std::env::temp_dir().join(format!("freeflow-sysfs-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("file"), content).unwrap();
        let path = CString::new(directory.as_os_str().as_bytes()).unwrap();
        let mut buffer = vec![0xaa_u8; bytes];
        // SAFETY: two C strings and a buffer of the given length.
        let count = unsafe { ibv_read_sysfs_file(path.as_ptr(), c"file".as_ptr(), buffer.as_mut_ptr().cast(), bytes) };
        std::fs::remove_dir_all(&directory).unwrap();
        (count, buffer)
    }

    #[test]
    fn a_newline_at_the_end_is_dropped() {
        let (count, buffer) = read("newline", b"RoCE v2\n", 8);
        assert_eq!((count, &buffer[..]), (7, &b"RoCE v2\0"[..]));
    }

    #[test]
    fn text_that_does_not_fit_is_refused() {
        assert_eq!(read("fits", b"abc", 4).0, 3);
        assert_eq!(read("too-long", b"abcd", 4).0, -1);
        assert_eq!(read("empty", b"", 4).0, 0);
    }

    #[test]
    fn a_missing_file_is_refused() {
        let mut buffer = [0 as c_char; 4];
        // SAFETY: two C strings and a buffer of the given length.
        let count = unsafe {
            ibv_read_sysfs_file(c"/nonexistent".as_ptr(), c"file".as_ptr(), buffer.as_mut_ptr(), buffer.len())
        };
        assert_eq!(count, -1);
    }

    #[test]
    fn path_records_go_there_and_back() {
        let record = ibv_sa_path_rec {
            dgid: ibv_gid { raw: [1; 16] },
            sgid: ibv_gid { raw: [2; 16] },
            dlid: 3,
            slid: 4,
            raw_traffic: 5,
            flow_label: 6,
            hop_limit: 7,
            traffic_class: 8,
            reversible: 9,
            numb_path: 10,
            pkey: 11,
            sl: 12,
            mtu_selector: 13,
            mtu: 14,
            rate_selector: 15,
            rate: 16,
            packet_life_time_selector: 17,
            packet_life_time: 18,
            preference: 19,
        };
        assert_eq!(path_from_kernel(&path_to_kernel(&record)), record);
    }

    #[test]
    fn the_state_is_the_callers() {
        let mut to = ibv_qp_attr { qp_state: 3, rate_limit: 9, ..Default::default() };
        let from = ib_uverbs_qp_attr { qp_state: 1, cur_qp_state: 2, qkey: 7, ..Default::default() };
        // SAFETY: both are valid.
        unsafe { ibv_copy_qp_attr_from_kern(&raw mut to, &raw const from) };
        assert_eq!((to.qp_state, to.cur_qp_state, to.qkey, to.rate_limit), (3, 2, 7, 9));
    }
}
