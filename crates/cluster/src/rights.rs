//! Rights in etcd, as a cluster needs them: docs/CLUSTER.md has the same by hand.
use crate::ClusterError;
use crate::authority::{OPERATOR_USER, ROOT_USER, check_secret};
use crate::file::ClusterFile;
use crate::users::{check_user, join_user};
use freeflow_etcd::{Auth, EtcdError, Right};
use freeflow_orchestrator::store::StoreError;

/// Gives rights, as etcd's root.
pub(crate) struct Rights {
    auth: Auth,
    file: ClusterFile,
}

fn failed(error: EtcdError) -> ClusterError {
    match error {
        EtcdError::Denied(why) => ClusterError::File(format!(
            "etcd lets {ROOT_USER} not give rights: {why}; is the certificate of {ROOT_USER} this etcd's?"
        )),
        other => StoreError::from(other).into(),
    }
}

impl Rights {
    /// Of a file with an authority.
    pub fn open(file: &ClusterFile) -> Result<Self, ClusterError> {
        file.authority.as_ref().map(|files| check_secret(&files.root_key)).transpose()?;
        Ok(Self { auth: Auth::new(&file.as_root().endpoints()?).map_err(failed)?, file: file.clone() })
    }

    /// The users that each cluster has, and that rights count from now on. The users that there were not.
    fn begin(&self) -> Result<Vec<&'static str>, ClusterError> {
        let all = self.file.keys().prefix();
        let mut new = Vec::new();
        for (user, right) in [(ROOT_USER, None), (OPERATOR_USER, Some(&all))] {
            if self.auth.add_user(user).map_err(failed)? {
                new.push(user);
            }
            self.auth.add_role(user).map_err(failed)?;
            if let Some(prefix) = right {
                self.auth.give_right(user, Right::ReadWrite, prefix).map_err(failed)?;
            }
            self.auth.give_role(user, user).map_err(failed)?;
        }
        self.auth.enable().map_err(failed)?;
        Ok(new)
    }

    /// A host: it reads all of the cluster, and writes of itself; a controller gives blocks and admits hosts, too. One
    /// that was a controller before is none any more.
    pub fn give_host(&self, user: &str, host: &str, is_controller: bool) -> Result<(), ClusterError> {
        check_user(user, host)?;
        let keys = self.file.keys();
        self.auth.add_role(user).map_err(failed)?;
        self.auth.give_right(user, Right::Read, &keys.prefix()).map_err(failed)?;
        for part in keys.of_host(host) {
            self.auth.give_right(user, Right::ReadWrite, &format!("{part}/")).map_err(failed)?;
        }
        for part in [keys.blocks(), keys.places(), keys.requests(), keys.admission()] {
            let prefix = format!("{part}/");
            match is_controller {
                true => self.auth.give_right(user, Right::ReadWrite, &prefix).map_err(failed)?,
                false => self.auth.take_right(user, &prefix).map_err(failed)?,
            }
        }
        self.auth.add_user(user).map_err(failed)?;
        self.auth.give_role(user, user).map_err(failed)
    }

    /// The bearer of a token: it asks there, and finds the answers.
    pub fn give_token(&self, id: &str) -> Result<(), ClusterError> {
        let (user, part) = (join_user(id), format!("{}/", self.file.keys().requests_by(id)));
        self.auth.add_role(&user).map_err(failed)?;
        self.auth.give_right(&user, Right::ReadWrite, &part).map_err(failed)?;
        self.auth.add_user(&user).map_err(failed)?;
        self.auth.give_role(&user, &user).map_err(failed)
    }

    /// Nobody asks by it any more, and what was asked is gone.
    pub fn take_token(&self, id: &str) -> Result<(), ClusterError> {
        self.auth.delete(&join_user(id)).map_err(failed)?;
        self.file.as_root().store(&self.file.keys().requests_by(id))?.delete_all()?;
        Ok(())
    }

    /// All users in etcd, also those of other clusters that share it.
    pub fn users(&self) -> Result<Vec<String>, ClusterError> {
        self.auth.users().map_err(failed)
    }

    /// Whether it is a token of this cluster.
    pub fn is_own_token(&self, id: &str) -> Result<bool, ClusterError> {
        let part = format!("{}/", self.file.keys().requests_by(id));
        self.auth.has_right(&join_user(id), &part).map_err(failed)
    }

    /// Whether it is the user of a host of this cluster.
    pub fn is_own_host(&self, user: &str) -> Result<bool, ClusterError> {
        self.auth.has_right(user, &self.file.keys().prefix()).map_err(failed)
    }

    /// A host that is a host no more.
    pub fn take_host(&self, user: &str, host: &str) -> Result<(), ClusterError> {
        check_user(user, host)?;
        self.auth.delete(user).map_err(failed)
    }
}

/// Makes the users that each cluster has, root and operator, with their rights, and has rights count from now on. The
/// users that there were not; `None`: the file names no authority, so rights are others' business.
///
/// # Errors
/// etcd did not do it.
pub fn begin_rights(file: &ClusterFile) -> Result<Option<Vec<&'static str>>, ClusterError> {
    match &file.authority {
        Some(_) => Rights::open(file)?.begin().map(Some),
        None => Ok(None),
    }
}
