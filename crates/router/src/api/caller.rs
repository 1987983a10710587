//! Caller at the other end of a connection, and its role.
//!
//! Roles come from the credentials that the kernel noted when the connection was made: uid 0 or the
//! Unix group `freeflow-admin` is the admin, `freeflow-tenant-NAME` an admin of that tenant,
//! `freeflow-viewer` reads. Groups are looked up by name in `/etc/group` alone: the router is
//! linked statically and asks no name service. Whoever lives in another PID namespace than the
//! router, such as a container's root, is nobody.
use crate::audit::{NO_ROLE, Who};
use freeflow_orchestrator::name_is_good;
use freeflow_shm::fd;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

const GROUP_FILE: &str = "/etc/group";
const GROUP_FILE_BYTES_MAX: u64 = 4 << 20;
const ADMIN_GROUP: &str = "freeflow-admin";
const VIEWER_GROUP: &str = "freeflow-viewer";
const TENANT_GROUP: &str = "freeflow-tenant-";

/// Permissions of a caller. The default: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// Everything.
    pub is_admin: bool,
    /// Read everything.
    pub is_viewer: bool,
    /// Read what is theirs, and change their groups, rules and vNICs.
    pub tenants: BTreeSet<String>,
}

impl Role {
    /// A process of this user that has these groups, whose names are `names`.
    pub fn of(uid: u32, groups: impl IntoIterator<Item = u32>, names: &GroupNames) -> Self {
        let mut role = Self { is_admin: uid == 0, ..Self::default() };
        for name in groups.into_iter().filter_map(|group| names.get(&group)).flatten() {
            match name.as_str() {
                ADMIN_GROUP => role.is_admin = true,
                VIEWER_GROUP => role.is_viewer = true,
                name => role.tenants.extend(name.strip_prefix(TENANT_GROUP).map(str::to_owned)),
            }
        }
        role
    }

    pub fn is_nobody(&self) -> bool {
        *self == Self::default()
    }

    pub fn reads_all(&self) -> bool {
        self.is_admin || self.is_viewer
    }

    /// Tenants of the networks and vNICs that it may read; `None`: all.
    pub fn read_tenants(&self) -> Option<BTreeSet<String>> {
        (!self.reads_all()).then(|| self.tenants.clone())
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_admin {
            return f.write_str("admin");
        }
        let mut words: Vec<String> = self.tenants.iter().map(|name| format!("tenant-admin:{name}")).collect();
        words.extend(self.is_viewer.then(|| "viewer".to_owned()));
        f.write_str(if words.is_empty() { NO_ROLE } else { "" })?;
        f.write_str(&words.join(","))
    }
}

/// By number, the names of the groups that mean something here.
pub type GroupNames = BTreeMap<u32, Vec<String>>;

/// From the text of group(5).
fn group_names(text: &str) -> GroupNames {
    let mut names = GroupNames::new();
    for line in text.lines() {
        let mut fields = line.split(':');
        let (Some(name), Some(_), Some(Ok(number))) = (fields.next(), fields.next(), fields.next().map(str::parse))
        else {
            continue;
        };
        let tenant = name.strip_prefix(TENANT_GROUP);
        if name == ADMIN_GROUP || name == VIEWER_GROUP || tenant.is_some_and(name_is_good) {
            names.entry(number).or_default().push(name.to_owned());
        }
    }
    names
}

/// `/etc/group`, read again when it has changed.
#[derive(Default)]
pub struct Groups {
    seen: Option<(u64, u64, i64, i64)>,
    names: GroupNames,
}

impl Groups {
    /// One that can't be read names nobody.
    fn names(&mut self) -> &GroupNames {
        if let Err(error) = self.refresh() {
            crate::base::log::warning!("can't read the groups: only root has a role", file = GROUP_FILE, error = error);
            (self.seen, self.names) = (None, GroupNames::new());
        }
        &self.names
    }

    fn refresh(&mut self) -> io::Result<()> {
        let mut file = File::open(GROUP_FILE)?;
        let about = file.metadata()?;
        let seen = (about.ino(), about.len(), about.mtime(), about.mtime_nsec());
        if self.seen == Some(seen) {
            return Ok(());
        }
        if about.len() > GROUP_FILE_BYTES_MAX {
            return Err(io::Error::other("it is too long"));
        }
        let mut bytes = Vec::new();
        Read::by_ref(&mut file).take(GROUP_FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        self.names = group_names(&String::from_utf8_lossy(&bytes));
        self.seen = Some(seen);
        Ok(())
    }
}

/// Somebody who is connected.
#[derive(Clone, Debug)]
pub struct Caller {
    pub who: Who,
    pub role: Arc<Role>,
}

impl Caller {
    /// A caller that has shown to be root otherwise.
    pub fn root(pid: i32) -> Self {
        let role = Role { is_admin: true, ..Role::default() };
        Self { who: Who { uid: 0, pid, role: role.to_string() }, role: Arc::new(role) }
    }

    /// Errors: the kernel doesn't say; the connection is as good as gone.
    pub fn of(socket: impl AsFd, groups: &mut Groups) -> io::Result<Self> {
        let socket = socket.as_fd();
        let credentials = fd::peer_credentials(socket)?;
        let role = if is_of_this_namespace(socket, credentials.pid) {
            let all = fd::peer_groups(socket)?.into_iter().chain([credentials.gid]);
            Role::of(credentials.uid, all, groups.names())
        } else {
            Role::default()
        };
        let who = Who { uid: credentials.uid, pid: credentials.pid, role: role.to_string() };
        Ok(Self { who, role: Arc::new(role) })
    }
}

/// Whether the process that connected lives in the router's own PID namespace. One that has ended does not.
pub fn is_of_this_namespace(socket: impl AsFd, pid: i32) -> bool {
    let look = || -> io::Result<bool> {
        if pid <= 0 {
            return Ok(false);
        }
        let process = fd::peer_pidfd(socket)?;
        let is_it = namespace_depth(&pid.to_string())? == namespace_depth("self")?;
        // Alive now, so the number was still its own a moment ago.
        Ok(is_it && fd::pidfd_alive(&process))
    };
    look().unwrap_or(false)
}

/// In how many PID namespaces a process has a number. One that the router sees lives in the
/// router's own or in one below that, so the depth decides. (To compare the namespaces
/// themselves would take CAP_SYS_PTRACE, which the thread of the REST server has not.)
fn namespace_depth(process: &str) -> io::Result<usize> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).ok_or(io::ErrorKind::NotFound)?;
    Ok(numbers.split_whitespace().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: &str = "root:x:0:\nfreeflow-admin:x:100:ann\nfreeflow-viewer:x:101:\nfreeflow-tenant-blue:x:102:\n\
        freeflow-tenant-red.1:x:103:bob\nfreeflow-tenant-:x:104:\nfreeflow-tenant-../x:x:105:\nfreeflow-admin2:x:106:\n\
        nonsense\nfreeflow-admin:x:many:\nalias:x:101:\nfreeflow-tenant-green:x:101:\n";

    fn role(uid: u32, groups: &[u32]) -> String {
        Role::of(uid, groups.iter().copied(), &group_names(GROUPS)).to_string()
    }

    #[test]
    fn roles_come_from_users_and_groups() {
        for (uid, groups, expected) in [
            (0, &[][..], "admin"),
            (0, &[103], "admin"),
            (1000, &[], "none"),
            (1000, &[0], "none"),
            (1000, &[1000, 100], "admin"),
            (1000, &[102], "tenant-admin:blue"),
            (1000, &[103, 102], "tenant-admin:blue,tenant-admin:red.1"),
            (1000, &[101], "tenant-admin:green,viewer"),
            (1000, &[104, 105, 106], "none"),
        ] {
            assert_eq!(role(uid, groups), expected, "{uid} {groups:?}");
        }
        let role = Role::of(7, [102], &group_names(GROUPS));
        assert!(!role.reads_all() && !role.is_nobody());
        assert!(Role::of(7, [], &group_names("")).is_nobody());
    }

    #[test]
    fn who_connects_is_known() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let caller = Caller::of(&one, &mut Groups::default()).unwrap();
        assert_eq!(caller.who.pid, std::process::id() as i32);
        assert_eq!(caller.role.is_admin, caller.who.uid == 0 || caller.role.is_admin);
    }
}
