//! Questions about an rsocket to librdmacm.
use crate::names::{self, Name};
use crate::real;
use crate::table::inside;
use libc::{c_int, sockaddr, socklen_t};

/// An option of the socket's level; 0: there is none.
fn number_of(rsocket: c_int, name: c_int) -> c_int {
    let (mut value, mut length): (c_int, socklen_t) = (0, 4);
    // SAFETY: room for a number.
    inside(|| unsafe {
        real::rgetsockopt(rsocket, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut length);
    });
    value
}

pub fn is_stream(rsocket: c_int) -> bool {
    number_of(rsocket, libc::SO_TYPE) == libc::SOCK_STREAM
}

pub fn family(rsocket: c_int) -> c_int {
    number_of(rsocket, libc::SO_DOMAIN)
}

/// An rsocket's address, or its peer's. `None`: errno has the reason.
pub fn name(call: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int, rsocket: c_int) -> Option<Name> {
    let (mut name, mut length) = names::none();
    // SAFETY: the room is as long as is said.
    let code = inside(|| unsafe { call(rsocket, (&raw mut name).cast(), &raw mut length) });
    (code == 0).then(|| names::in_family(family(rsocket), (name, length)))
}
