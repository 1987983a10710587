//! Certificates of elliptic-curve keys (P-256) are written here, and of an authority's own the name and the key are
//! read. Nothing that strangers have made is read: that is TLS's business, in `rustls` and in etcd.
use crate::ClusterError;
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::{self, SystemRandom};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair, UnparsedPublicKey,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use freeflow_verbs::civil_date;
use std::net::IpAddr;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const INTEGER: u8 = 0x02;
const BOOLEAN_TRUE: [u8; 3] = [0x01, 0x01, 0xff];
const BITS: u8 = 0x03;
const OCTETS: u8 = 0x04;
const UTF8: u8 = 0x0c;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// `id-ecPublicKey` and `prime256v1`.
const P256: [u8; 19] =
    [0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
/// `ecdsa-with-SHA256`.
const ECDSA: [u8; 10] = [0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];
const COMMON_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x04, 0x03];
/// `id-kp`, whose last number says for which side.
const EXTENDED_USAGE: [u8; 9] = [0x06, 0x08, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03];
/// Last numbers of `id-ce`.
const SUBJECT_KEY: u8 = 14;
const KEY_USAGE: u8 = 15;
const ALTERNATIVE_NAME: u8 = 17;
const BASIC_CONSTRAINTS: u8 = 19;
const AUTHORITY_KEY: u8 = 35;
const EXTENDED_KEY_USAGE: u8 = 37;

const KEY_LABEL: &str = "PRIVATE KEY";
const CERTIFICATE_LABEL: &str = "CERTIFICATE";
/// A point that is not compressed.
pub(crate) const PUBLIC_KEY_BYTES: usize = 65;
/// Clocks are not alike: a certificate holds since so long before it was made.
const BEFORE_S: u64 = 3600;

fn no_key(_: impl std::fmt::Debug) -> ClusterError {
    ClusterError::File("it is no private key of the kind P-256, as PKCS #8 in PEM".into())
}

/// A private key.
pub(crate) struct Key {
    pair: EcdsaKeyPair,
    pkcs8: Vec<u8>,
}

impl Key {
    pub fn generate() -> Result<Self, ClusterError> {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).map_err(no_key)?;
        Self::of(pkcs8.as_ref().to_vec())
    }

    fn of(pkcs8: Vec<u8>) -> Result<Self, ClusterError> {
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &pkcs8).map_err(no_key)?;
        Ok(Self { pair, pkcs8 })
    }

    pub fn from_pem(text: &str) -> Result<Self, ClusterError> {
        Self::of(from_pem(text, KEY_LABEL).ok_or(()).map_err(no_key)?)
    }

    pub fn pem(&self) -> String {
        to_pem(&self.pkcs8, KEY_LABEL)
    }

    pub fn public(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, ClusterError> {
        let signature = self.pair.sign(&SystemRandom::new(), message);
        Ok(signature.map_err(|_| ClusterError::File("the key signs nothing".into()))?.as_ref().to_vec())
    }
}

/// Whether the owner of a public key has signed it.
pub(crate) fn is_signed(public: &[u8], message: &[u8], signature: &[u8]) -> bool {
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, public).verify(message, signature).is_ok()
}

/// The subject of a certificate.
pub(crate) struct Subject<'a> {
    pub common_name: &'a str,
    pub public_key: &'a [u8],
    /// As the authority itself.
    pub is_authority: bool,
    /// Of a server; none: of a client alone.
    pub addresses: &'a [IpAddr],
    pub from_s: u64,
    pub until_s: u64,
}

/// An authority by its own certificate.
#[derive(Clone, Debug)]
pub(crate) struct Issuer {
    name: Vec<u8>,
    key_identifier: Option<Vec<u8>>,
    pub public_key: Vec<u8>,
}

fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let significant = &length[length.iter().position(|byte| *byte != 0).unwrap_or(length.len() - 1)..];
    let mut bytes = vec![tag];
    if content.len() >= 0x80 {
        bytes.push(0x80 | u8::try_from(significant.len()).expect("a length has eight bytes"));
    }
    bytes.extend(significant);
    bytes.extend(content);
    bytes
}

fn sequence(parts: &[&[u8]]) -> Vec<u8> {
    tlv(SEQUENCE, &parts.concat())
}

fn name(common_name: &str) -> Vec<u8> {
    sequence(&[&tlv(SET, &sequence(&[&COMMON_NAME, &tlv(UTF8, common_name.as_bytes())]))])
}

fn extension(number: u8, is_critical: bool, value: &[u8]) -> Vec<u8> {
    let critical: &[u8] = if is_critical { &BOOLEAN_TRUE } else { &[] };
    sequence(&[&[0x06, 0x03, 0x55, 0x1d, number], critical, &tlv(OCTETS, value)])
}

fn time(at_s: u64) -> Vec<u8> {
    let ((year, month, day), second) = (civil_date(at_s / 86_400), at_s % 86_400);
    let rest = format!("{month:02}{day:02}{:02}{:02}{:02}Z", second / 3600, second / 60 % 60, second % 60);
    match year {
        ..2050 => tlv(UTC_TIME, format!("{:02}{rest}", year % 100).as_bytes()),
        _ => tlv(GENERALIZED_TIME, format!("{year:04}{rest}").as_bytes()),
    }
}

/// Positive, of 127 bits, and not to be guessed.
fn serial() -> Result<Vec<u8>, ClusterError> {
    let mut bytes = random::<16>()?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(tlv(INTEGER, &bytes))
}

/// Random bytes.
pub(crate) fn random<const COUNT: usize>() -> Result<[u8; COUNT], ClusterError> {
    let mut bytes = [0; COUNT];
    rand::fill(&mut bytes).map_err(|_| ClusterError::File("the system has no random numbers".into()))?;
    Ok(bytes)
}

fn key_identifier(public_key: &[u8]) -> Vec<u8> {
    digest(&SHA256, public_key).as_ref()[..20].to_vec()
}

fn extensions(subject: &Subject<'_>, issuer: &Issuer) -> Vec<u8> {
    let (constraints, usage) = match subject.is_authority {
        // No authority below it; it signs certificates and answers.
        true => (sequence(&[&BOOLEAN_TRUE, &tlv(INTEGER, &[0])]), [BITS, 2, 2, 0x84]),
        false => (sequence(&[]), [BITS, 2, 7, 0x80]),
    };
    let mut all = vec![
        extension(BASIC_CONSTRAINTS, subject.is_authority, &constraints),
        extension(KEY_USAGE, true, &usage),
        extension(SUBJECT_KEY, false, &tlv(OCTETS, &key_identifier(subject.public_key))),
    ];
    if let Some(of_issuer) = &issuer.key_identifier {
        all.push(extension(AUTHORITY_KEY, false, &sequence(&[&tlv(0x80, of_issuer)])));
    }
    if !subject.is_authority {
        let side = |number: u8| [&EXTENDED_USAGE[..], &[number]].concat();
        let (server, client) = (side(1), side(2));
        let sides: &[&[u8]] = if subject.addresses.is_empty() { &[&client] } else { &[&server, &client] };
        all.push(extension(EXTENDED_KEY_USAGE, false, &sequence(sides)));
    }
    if !subject.addresses.is_empty() {
        let of = |address: &IpAddr| match address {
            IpAddr::V4(address) => tlv(0x87, &address.octets()),
            IpAddr::V6(address) => tlv(0x87, &address.octets()),
        };
        let addresses: Vec<u8> = subject.addresses.iter().flat_map(of).collect();
        all.push(extension(ALTERNATIVE_NAME, false, &sequence(&[&addresses])));
    }
    tlv(0xa3, &tlv(SEQUENCE, &all.concat()))
}

impl Issuer {
    /// One whose certificate is still to be made.
    pub fn new(common_name: &str, key: &Key) -> Self {
        let public_key = key.public().to_vec();
        Self { name: name(common_name), key_identifier: Some(key_identifier(&public_key)), public_key }
    }

    /// The authority of a certificate; `None`: of another kind of key, or no certificate.
    pub fn of_pem(text: &str) -> Option<Self> {
        let der = from_pem(text, CERTIFICATE_LABEL)?;
        let (certificate, _) = read(&der, SEQUENCE)?;
        let (mut rest, _) = read(certificate, SEQUENCE)?;
        if let Some((_, after)) = read(rest, 0xa0) {
            rest = after;
        }
        for tag in [INTEGER, SEQUENCE, SEQUENCE, SEQUENCE] {
            rest = read(rest, tag)?.1;
        }
        let (_, after) = read(rest, SEQUENCE)?;
        let name = rest[..rest.len() - after.len()].to_vec();
        let (key, _) = read(after, SEQUENCE)?;
        let (kind, key) = read(key, SEQUENCE)?;
        let (bits, _) = read(key, BITS)?;
        let public_key = bits.get(1..).filter(|key| kind == P256 && key.len() == PUBLIC_KEY_BYTES)?.to_vec();
        // An octet string of 20 bytes in another one.
        let head = [0x06, 0x03, 0x55, 0x1d, SUBJECT_KEY, OCTETS, 22, OCTETS, 20];
        let at = der.windows(head.len()).position(|window| window == head);
        let key_identifier = at.and_then(|at| der.get(at + head.len()..at + head.len() + 20)).map(<[u8]>::to_vec);
        Some(Self { name, key_identifier, public_key })
    }

    /// A certificate of this authority's, by its key (PEM).
    pub fn issue(&self, key: &Key, subject: &Subject<'_>) -> Result<String, ClusterError> {
        let algorithm = sequence(&[&ECDSA]);
        let bits = |bytes: &[u8]| tlv(BITS, &[&[0], bytes].concat());
        let signed = sequence(&[
            &tlv(0xa0, &tlv(INTEGER, &[2])),
            &serial()?,
            &algorithm,
            &self.name,
            &sequence(&[&time(subject.from_s.saturating_sub(BEFORE_S)), &time(subject.until_s)]),
            &name(subject.common_name),
            &sequence(&[&sequence(&[&P256]), &bits(subject.public_key)]),
            &extensions(subject, self),
        ]);
        let signature = key.sign(&signed)?;
        Ok(to_pem(&sequence(&[&signed, &algorithm, &bits(&signature)]), CERTIFICATE_LABEL))
    }
}

/// The content of the first element, which has to be of this kind, and what comes after it.
fn read(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (_, rest) = bytes.split_first().filter(|(first, _)| **first == tag)?;
    let (length, rest) = rest.split_first()?;
    let (length, rest) = match length {
        0..=0x7f => (usize::from(*length), rest),
        0x81 | 0x82 => {
            let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            (digits.iter().fold(0, |all, byte| all << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

fn to_pem(der: &[u8], label: &str) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> = (0..text.len()).step_by(64).map(|at| &text[at..text.len().min(at + 64)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// The first one with this label.
fn from_pem(text: &str, label: &str) -> Option<Vec<u8>> {
    let (_, rest) = text.split_once(&format!("-----BEGIN {label}-----"))?;
    let (body, _) = rest.split_once(&format!("-----END {label}-----"))?;
    let body: String = body.split_ascii_whitespace().collect();
    STANDARD.decode(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_encoded_by_their_century() {
        assert_eq!(time(1_000_000_000), tlv(UTC_TIME, b"010909014640Z"));
        assert_eq!(time(2_524_608_000), tlv(GENERALIZED_TIME, b"20500101000000Z"));
    }

    #[test]
    fn lengths_have_as_many_bytes_as_they_need() {
        for (length, head) in
            [(0, vec![4, 0]), (127, vec![4, 127]), (128, vec![4, 0x81, 128]), (256, vec![4, 0x82, 1, 0])]
        {
            let bytes = tlv(4, &vec![7; length]);
            assert_eq!(bytes[..head.len()], head);
            assert_eq!(read(&bytes, 4), Some((&vec![7; length][..], &[][..])));
            assert_eq!(read(&bytes[..bytes.len() - 1], 4), None);
        }
    }

    #[test]
    fn an_authority_is_read_from_its_certificate() {
        let key = Key::generate().expect("a key");
        let issuer = Issuer::new("authority", &key);
        let subject = Subject {
            common_name: "authority",
            public_key: key.public(),
            is_authority: true,
            addresses: &[],
            from_s: 1_000_000_000,
            until_s: 2_000_000_000,
        };
        let pem = issuer.issue(&key, &subject).expect("a certificate");
        let read = Issuer::of_pem(&pem).expect("an authority");
        assert_eq!((&read.name, &read.public_key), (&issuer.name, &issuer.public_key));
        assert_eq!(read.key_identifier, issuer.key_identifier);
        let again = Key::from_pem(&key.pem()).expect("the same key");
        let signature = again.sign(b"text").expect("signed");
        assert!(is_signed(&read.public_key, b"text", &signature));
        assert!(!is_signed(&read.public_key, b"test", &signature));
        assert!(Issuer::of_pem("").is_none() && Issuer::of_pem(&key.pem()).is_none() && Key::from_pem(&pem).is_err());
    }
}
