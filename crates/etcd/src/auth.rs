//! etcd's users, roles and rights: who may read and write which keys, by the common name of a certificate.
//!
//! Each call may be made again: whatever is there already is not an error, nor is what is gone.
use crate::client::Client;
use crate::endpoint::Endpoints;
use crate::error::EtcdError;
use crate::messages::{HeaderOnly, prefix_end};
use prost::Message;
use tokio::runtime::Runtime;

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct UserAddOptions {
    #[prost(bool, tag = "1")]
    no_password: bool,
}

#[derive(Clone, PartialEq, Message)]
struct UserAddRequest {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "3")]
    options: Option<UserAddOptions>,
}

/// Of a user's, or a role's: to be added or deleted.
#[derive(Clone, PartialEq, Message)]
struct NameRequest {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct UserGrantRoleRequest {
    #[prost(string, tag = "1")]
    user: String,
    #[prost(string, tag = "2")]
    role: String,
}

#[derive(Clone, PartialEq, Message)]
struct Permission {
    /// 0: read, 1: write, 2: both.
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct RoleGrantPermissionRequest {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    permission: Option<Permission>,
}

#[derive(Clone, PartialEq, Message)]
struct RoleRevokePermissionRequest {
    #[prost(string, tag = "1")]
    role: String,
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UserListResponse {
    #[prost(string, repeated, tag = "2")]
    users: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct RoleGetResponse {
    #[prost(message, repeated, tag = "2")]
    permissions: Vec<Permission>,
}

/// A right to all keys that begin so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// To read them.
    Read,
    /// To read and write them.
    ReadWrite,
}

/// Changes users, roles and rights, with the credential of etcd's root.
pub struct Auth {
    runtime: Runtime,
    client: Client,
}

impl Auth {
    /// Nothing is connected yet.
    ///
    /// # Errors
    /// `Invalid`: certificates that can't be used. `Other`: no resources for a runtime.
    pub fn new(endpoints: &Endpoints) -> Result<Self, EtcdError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| EtcdError::Other(error.to_string()))?;
        let client = {
            let _inside = runtime.enter();
            Client::new(endpoints)?
        };
        Ok(Self { runtime, client })
    }

    fn call<Q: Message + Clone + 'static>(&self, path: &'static str, message: Q) -> Result<(), EtcdError> {
        let answer: Result<HeaderOnly, EtcdError> = self.runtime.block_on(self.client.repeat(path, message));
        answer.map(drop)
    }

    /// A user that has a certificate and no password; whether there was none of the name.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn add_user(&self, name: &str) -> Result<bool, EtcdError> {
        let options = Some(UserAddOptions { no_password: true });
        let done = self.call("/etcdserverpb.Auth/UserAdd", UserAddRequest { name: name.into(), options });
        is_new(done, "user name already exists")
    }

    /// A role without rights; whether there was none of the name.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn add_role(&self, name: &str) -> Result<bool, EtcdError> {
        is_new(self.call("/etcdserverpb.Auth/RoleAdd", NameRequest { name: name.into() }), "role name already exists")
    }

    /// All users.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn users(&self) -> Result<Vec<String>, EtcdError> {
        let answer: UserListResponse =
            self.runtime.block_on(self.client.repeat("/etcdserverpb.Auth/UserList", Nothing {}))?;
        Ok(answer.users)
    }

    /// Whether the role, if it is there, has a right to the keys that begin with the prefix, by that prefix.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn has_right(&self, role: &str, prefix: &str) -> Result<bool, EtcdError> {
        let request = NameRequest { name: role.into() };
        let answer: Result<RoleGetResponse, EtcdError> =
            self.runtime.block_on(self.client.repeat("/etcdserverpb.Auth/RoleGet", request));
        match answer {
            Ok(role) => Ok(role.permissions.iter().any(|right| right.key == prefix.as_bytes())),
            Err(error) if error.to_string().contains("role name not found") => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The user has the role.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn give_role(&self, user: &str, role: &str) -> Result<(), EtcdError> {
        let request = UserGrantRoleRequest { user: user.into(), role: role.into() };
        self.call("/etcdserverpb.Auth/UserGrantRole", request)
    }

    /// The role has this right to all keys that begin with the prefix.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn give_right(&self, role: &str, right: Right, prefix: &str) -> Result<(), EtcdError> {
        let kind = match right {
            Right::Read => 0,
            Right::ReadWrite => 2,
        };
        let (key, range_end) = (prefix.as_bytes().to_vec(), prefix_end(prefix.as_bytes()));
        let permission = Some(Permission { kind, key, range_end });
        let request = RoleGrantPermissionRequest { name: role.into(), permission };
        self.call("/etcdserverpb.Auth/RoleGrantPermission", request)
    }

    /// The role has no right to the keys that begin with the prefix, by that prefix.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn take_right(&self, role: &str, prefix: &str) -> Result<(), EtcdError> {
        let (key, range_end) = (prefix.as_bytes().to_vec(), prefix_end(prefix.as_bytes()));
        let request = RoleRevokePermissionRequest { role: role.into(), key, range_end };
        let done = self.call("/etcdserverpb.Auth/RoleRevokePermission", request);
        is_new(done, "permission is not granted to the role").map(drop)
    }

    /// The user and the role of this name are there no more: a certificate of that name is nobody's.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn delete(&self, name: &str) -> Result<(), EtcdError> {
        let request = NameRequest { name: name.into() };
        is_new(self.call("/etcdserverpb.Auth/UserDelete", request.clone()), "user name not found")?;
        is_new(self.call("/etcdserverpb.Auth/RoleDelete", request), "role name not found")?;
        Ok(())
    }

    /// From now on rights count. There has to be a user `root` with the role `root`.
    ///
    /// # Errors
    /// etcd did not do it.
    pub fn enable(&self) -> Result<(), EtcdError> {
        self.call("/etcdserverpb.Auth/AuthEnable", Nothing {})
    }
}

/// Whether it was done now; it need not be if etcd says these words.
fn is_new(done: Result<(), EtcdError>, words: &str) -> Result<bool, EtcdError> {
    match done {
        Ok(()) => Ok(true),
        Err(error) if error.to_string().contains(words) => Ok(false),
        Err(error) => Err(error),
    }
}
