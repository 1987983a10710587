//! Names of users in etcd, and of tokens: whose each is can be seen by it.
use crate::ClusterError;
use crate::x509::random;
use freeflow_orchestrator::{Reason, Refusal};

/// Of a token's name.
pub(crate) const ID_BYTES: usize = 6;
/// Before the token's name.
const JOIN_USER: &str = "join-";
/// Drawn for each user of a host.
const USER_BYTES: usize = 8;

pub(crate) fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a text is so many bytes in digits.
fn is_digits(text: &str, byte_count: usize) -> bool {
    text.len() == 2 * byte_count && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether a text can be a token's name.
pub(crate) fn is_id(text: &str) -> bool {
    is_digits(text, ID_BYTES)
}

/// The user in etcd, and the role, of a token's bearer.
pub(crate) fn join_user(id: &str) -> String {
    format!("{JOIN_USER}{id}")
}

/// The token whose bearer's user it is.
pub(crate) fn token_of_user(user: &str) -> Option<&str> {
    user.strip_prefix(JOIN_USER).filter(|id| is_id(id))
}

/// The name of a new user in etcd for a host: none makes it root, or another host.
pub(crate) fn new_user(host: &str) -> Result<String, ClusterError> {
    Ok(format!("host-{host}-{}", digits(&random::<USER_BYTES>()?)))
}

/// Whether a name can be that of a host's user, and of nobody else's.
pub(crate) fn is_user_of(user: &str, host: &str) -> bool {
    let rest =
        user.strip_prefix("host-").and_then(|rest| rest.strip_prefix(host)).and_then(|rest| rest.strip_prefix('-'));
    rest.is_some_and(|rest| is_digits(rest, USER_BYTES))
}

/// The host whose user it is.
pub(crate) fn host_of_user(user: &str) -> Option<&str> {
    let (host, _) = user.strip_prefix("host-")?.rsplit_once('-')?;
    Some(host).filter(|host| is_user_of(user, host))
}

/// Nobody gets a certificate or rights by a name that somebody has written among those of hosts that were admitted,
/// such as root's.
pub(crate) fn check_user(user: &str, host: &str) -> Result<(), ClusterError> {
    match is_user_of(user, host) {
        true => Ok(()),
        false => Err(Refusal::new(
            Reason::Forbidden,
            format!(
                "etcd has {user:?} for the user of host {host}, which is none of a host: freeflow cluster remove {host}"
            ),
        )
        .into()),
    }
}
