//! Kubeconfig files, as `kubectl` has them: the current context's server and identity.
use super::configuration::{Configuration, Server, Source, invalid};
use super::error::ApiError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use freeflow_cluster::host_names;
use serde::Deserialize;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::Path;

const FILE_BYTES_MAX: u64 = 4 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    #[serde(default)]
    current_context: String,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    #[serde(default)]
    user: String,
    #[serde(default)]
    namespace: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    tls_server_name: Option<String>,
    certificate_authority: Option<String>,
    certificate_authority_data: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<String>,
    client_certificate_data: Option<String>,
    client_key: Option<String>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<String>,
    username: Option<Value>,
    exec: Option<Value>,
    auth_provider: Option<Value>,
}

/// Data in the file, or a file beside it. Data come first, as in `kubectl`.
fn source(data: Option<&str>, file: Option<&str>, path: &Path, what: &str) -> Result<Option<Source>, ApiError> {
    if let Some(data) = data.filter(|data| !data.is_empty()) {
        let bytes = STANDARD.decode(data.trim());
        let bytes = bytes.map_err(|error| invalid(format!("{}: {what}-data: {error}", path.display())))?;
        return Ok(Some(Source::Bytes(bytes)));
    }
    let directory = path.parent().unwrap_or(Path::new("."));
    Ok(file.filter(|file| !file.is_empty()).map(|file| Source::File(directory.join(file))))
}

impl Configuration {
    /// Of a kubeconfig file, or of the pod that this runs in.
    ///
    /// # Errors
    /// `Invalid`: neither is there, or it is not understood.
    pub fn find(kubeconfig: Option<&Path>) -> Result<Self, ApiError> {
        match kubeconfig {
            Some(path) => Self::of_file(path),
            None => Self::of_pod(),
        }
    }

    /// # Errors
    /// `Invalid`: the file can't be read, or has an identity of a kind that is not known here (plugins, passwords).
    pub fn of_file(path: &Path) -> Result<Self, ApiError> {
        read(path, &host_names())
    }
}

/// The context in use.
fn read(path: &Path, names: &str) -> Result<Configuration, ApiError> {
    let failed = |why: String| invalid(format!("{}: {why}", path.display()));
    let mut text = String::new();
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    let found: Kubeconfig = serde_saphyr::from_str(&text).map_err(|error| failed(error.to_string()))?;
    let current = &found.current_context;
    let context = found.contexts.into_iter().find(|one| one.name == *current).map(|one| one.context);
    let context = context.ok_or_else(|| failed(format!("it has no context `{current}` (current-context)")))?;
    let cluster = found.clusters.into_iter().find(|one| one.name == context.cluster).map(|one| one.cluster);
    let cluster = cluster.ok_or_else(|| failed(format!("it has no cluster `{}`", context.cluster)))?;
    let user = match context.user.as_str() {
        "" => User::default(),
        name => {
            let user = found.users.into_iter().find(|one| one.name == name).map(|one| one.user);
            user.ok_or_else(|| failed(format!("it has no user `{name}`")))?
        }
    };
    if cluster.insecure_skip_tls_verify {
        return Err(failed("insecure-skip-tls-verify is refused; give certificate-authority".into()));
    }
    if user.exec.is_some() || user.auth_provider.is_some() || user.username.is_some() {
        return Err(failed("the user has a plugin or a password; a certificate or a token is wanted".into()));
    }
    let (data, file) = (&cluster.certificate_authority_data, &cluster.certificate_authority);
    let authority = source(data.as_deref(), file.as_deref(), path, "certificate-authority")?;
    let (data, file) = (&user.client_certificate_data, &user.client_certificate);
    let certificate = source(data.as_deref(), file.as_deref(), path, "client-certificate")?;
    let key = source(user.client_key_data.as_deref(), user.client_key.as_deref(), path, "client-key")?;
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(failed("client-certificate and client-key are given together or not at all".into())),
    };
    let token = match user.token.filter(|token| !token.is_empty()) {
        Some(token) => Some(Source::Bytes(token.into_bytes())),
        None => source(None, user.token_file.as_deref(), path, "token")?,
    };
    let server = Server::parse(&cluster.server, names).map_err(|error| failed(error.to_string()))?;
    if !server.is_secure && (token.is_some() || identity.is_some()) {
        return Err(failed("a token or certificate is not sent by http; https is wanted".into()));
    }
    let (server_name, namespace) = (cluster.tls_server_name, context.namespace);
    Ok(Configuration { server, server_name, authority, identity, token, namespace })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn written(text: &str) -> Result<Configuration, ApiError> {
        let name = format!("freeflow-kubeconfig-{:?}-{}", std::thread::current().id(), std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).unwrap();
        let result = read(&path, "");
        fs::remove_file(&path).unwrap();
        result
    }

    fn file(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: other\n  context: {{cluster: x}}\n\
             - name: c\n  context: {{cluster: k, user: u, namespace: team-a}}\nclusters:\n- name: k\n  \
             cluster: {{{cluster}}}\nusers:\n- name: u\n  user: {{{user}}}\n"
        )
    }

    #[test]
    fn the_current_context_counts() {
        let text = file(
            "server: 'https://192.0.2.1:6443', certificate-authority: ca.pem, tls-server-name: kubernetes",
            "client-certificate-data: b25l, client-key-data: dHdv, token: ''",
        );
        let found = written(&text).unwrap();
        assert_eq!((found.namespace(), found.server_name.as_deref()), ("team-a", Some("kubernetes")));
        assert!(found.authority == Some(Source::File(std::env::temp_dir().join("ca.pem"))), "beside the file");
        assert!(found.identity == Some((Source::Bytes(b"one".into()), Source::Bytes(b"two".into()))));
        assert!(found.token.is_none());
        let text = file("server: 'https://192.0.2.1:6443'", "tokenFile: /t/token");
        assert!(written(&text).unwrap().token == Some(Source::File("/t/token".into())));
    }

    #[test]
    fn other_files_are_refused_with_a_reason() {
        let server = "server: 'https://192.0.2.1:6443'";
        for (text, reason) in [
            (file(server, "exec: {command: aws}"), "plugin"),
            (file(server, "username: a, password: b"), "password"),
            (file(server, "client-key: k"), "together"),
            (file(&format!("{server}, insecure-skip-tls-verify: true"), ""), "insecure-skip-tls-verify"),
            (file("server: 'http://192.0.2.1:8080'", "token: secret"), "https is wanted"),
            (file(&format!("{server}, certificate-authority-data: '***'"), ""), "certificate-authority-data"),
            (file(server, "").replace("current-context: c", "current-context: d"), "no context `d`"),
            ("- just\n- a list\n".to_string(), "freeflow-kubeconfig"),
        ] {
            let error = written(&text).map(|_| ()).expect_err(reason).to_string();
            assert!(error.contains(reason) && !error.contains("secret"), "{error}");
        }
    }
}
