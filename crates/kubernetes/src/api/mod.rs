//! A client of Kubernetes' API server: as much as FreeFlow needs, and no more.
//!
//! - [`Configuration`]: where the server is and who we are to it, in a pod or by a kubeconfig file.
//! - [`Client`]: requests with limits of size and time, by connections that are kept.
//! - [`Collection`]: objects of one [`Kind`], as types of our own ([`objects`]) or as [`serde_json::Value`].
//! - [`Watcher`]: the present objects, then every change of them, whatever happens on the way.
//!
//! Types have the fields that are used here. So replacing an object by a type that lacks fields would remove these:
//! change parts of an object by [`Collection::merge`] or [`Collection::apply`].
//!
//! ```
//! use freeflow_kubernetes::api::{Kind, objects};
//!
//! const PODS: Kind = Kind::new("", "v1", "pods");
//! assert_eq!(PODS.path(Some("team-a"), Some("web")).unwrap(), "/api/v1/namespaces/team-a/pods/web");
//! assert!(PODS.path(Some(".."), None).is_err());
//! ```

mod client;
mod collection;
mod configuration;
mod connection;
mod error;
mod kubeconfig;
pub mod objects;
mod watcher;

#[cfg(test)]
pub(crate) mod test_server;
#[cfg(test)]
mod tests;

pub use client::Client;
pub use collection::{Collection, Kind, Preconditions, Selection};
pub use configuration::Configuration;
pub use error::ApiError;
pub use watcher::{News, Watcher};
