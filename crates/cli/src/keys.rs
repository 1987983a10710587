//! Private keys of hosts, in files.

use crate::failure::{Context, Result, fail};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

const PATTERN: &str = "Noise_KK_25519_ChaChaPoly_BLAKE2s";
const KEY_BYTES: usize = 32;
/// More than a key's file has.
const FILE_BYTES_MAX: u64 = 1024;

/// Makes a private key's file, if there is none; the public key in hexadecimal digits.
pub fn key(path: &Path) -> Result<String> {
    let shown = path.display();
    let mut file = match File::options().write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return existing_key(path),
        Err(error) => fail!("can't make {shown}: {error}"),
    };
    let pattern = PATTERN.parse().context("the key's kind")?;
    let pair = snow::Builder::new(pattern).generate_keypair().context("can't make a key")?;
    let written = writeln!(file, "{}", hexadecimal(&pair.private)).and_then(|()| file.sync_all());
    if let Err(error) = written {
        let _ = std::fs::remove_file(path);
        fail!("can't write {shown}: {error}");
    }
    Ok(hexadecimal(&pair.public))
}

/// The public key that belongs to the private one of a file.
fn existing_key(path: &Path) -> Result<String> {
    let shown = path.display();
    let file = File::open(path).context(format!("can't read {shown}"))?;
    let metadata = file.metadata().context(format!("can't read {shown}"))?;
    if metadata.mode() & 0o077 != 0 {
        fail!("{shown}: others may read or write it, so it is no secret; use another file, or chmod 600 {shown}");
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).context(format!("can't read {shown}"))?;
    let Some(private) = bytes(text.trim_ascii()) else {
        fail!("{shown}: there is something else in it, not a key; give the name of a new file");
    };
    let mut pair = DefaultResolver.resolve_dh(&snow::params::DHChoice::Curve25519).expect("the one that is built in");
    pair.set(&private);
    Ok(hexadecimal(pair.pubkey()))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A key from its hexadecimal digits.
fn bytes(text: &str) -> Option<[u8; KEY_BYTES]> {
    if text.len() != 2 * KEY_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut key = [0; KEY_BYTES];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_hexadecimal_digits() {
        assert_eq!(bytes(&"0a".repeat(32)), Some([10; 32]));
        assert_eq!(hexadecimal(&[10, 255]), "0aff");
        for bad in ["", "0a", &"0g".repeat(32), &"+a".repeat(32), &"é".repeat(32)] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
    }
}
