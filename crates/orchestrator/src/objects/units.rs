//! Rates and sizes as people write them. Written back in the largest unit that says them exactly.
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;
use core::str::FromStr;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// The form that a text should have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct UnitError(&'static str);

/// `[digits][.digits][unit]`, exact: `None` if it is anything else, 0, or no whole number of the smallest unit.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|byte: char| !byte.is_ascii_digit() && byte != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    let factor = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 9 || number.ends_with('.') {
        return None;
    }
    let mut value = whole.parse::<u64>().ok()?.checked_mul(factor)?;
    if !fraction.is_empty() {
        let scale = 10u64.pow(fraction.len() as u32);
        let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(factor);
        if part % u128::from(scale) != 0 {
            return None;
        }
        value = value.checked_add((part / u128::from(scale)) as u64)?;
    }
    (value > 0).then_some(value)
}

fn text_of(value: u64, units: &[(&str, u64)]) -> String {
    let (unit, factor) =
        units.iter().rev().find(|(_, factor)| value.is_multiple_of(*factor)).copied().unwrap_or(("", 1));
    format!("{}{unit}", value / factor)
}

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $expected:literal, [$(($unit:literal, $factor:expr)),*]) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl $name {
            const UNITS: &'static [(&'static str, u64)] = &[$(($unit, $factor)),*];
            const ERROR: UnitError = UnitError($expected);
        }

        impl FromStr for $name {
            type Err = UnitError;

            fn from_str(text: &str) -> Result<Self, UnitError> {
                parse(text.trim(), Self::UNITS).map(Self).ok_or(Self::ERROR)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&text_of(self.0, Self::UNITS))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.to_string())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Words;
                impl Visitor<'_> for Words {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                    fn visit_u64<E: de::Error>(self, value: u64) -> Result<$name, E> {
                        if value == 0 { Err(E::custom($name::ERROR)) } else { Ok($name(value)) }
                    }
                    fn visit_i64<E: de::Error>(self, value: i64) -> Result<$name, E> {
                        self.visit_u64(u64::try_from(value).unwrap_or(0))
                    }
                }
                deserializer.deserialize_any(Words)
            }
        }
    };
}

quantity! {
    /// bits/s.
    BitRate, "a rate is written like 500Mbit, 2.5Gbit, or as bits per second, and is more than 0",
    [("", 1), ("bit", 1), ("kbit", 1000), ("Mbit", 1_000_000), ("Gbit", 1_000_000_000)]
}
quantity! {
    /// Bytes.
    ByteCount, "a size is written like 64KiB, 1MiB, 2GiB, or as bytes, and is more than 0",
    [("", 1), ("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)]
}
quantity! {
    /// Messages/s.
    MessageRate, "a message rate is written like 500, 200k, 1.5M, per second, and is more than 0",
    [("", 1), ("k", 1000), ("M", 1_000_000)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_exact_and_written_back() {
        for (text, value, back) in [
            ("1Gbit", 1_000_000_000, "1Gbit"),
            ("2.5gbit", 2_500_000_000, "2500Mbit"),
            ("100 Mbit", 100_000_000, "100Mbit"),
            ("64000", 64_000, "64kbit"),
            ("1bit", 1, "1bit"),
        ] {
            let rate: BitRate = text.parse().unwrap();
            assert_eq!((rate.0, rate.to_string().as_str()), (value, back), "{text}");
            assert_eq!(back.parse::<BitRate>(), Ok(rate));
        }
        assert_eq!("64KiB".parse::<ByteCount>().unwrap().0, 65_536);
        assert_eq!("1.5M".parse::<MessageRate>().unwrap().to_string(), "1500k");
    }

    #[test]
    fn everything_else_is_refused() {
        for bad in
            ["", "0", "-1", "1.", ".5", "1.5bit", "1Gbyte", "Gbit", "1e9", "99999999999Gbit", "1Gbit x", "0.0Mbit"]
        {
            assert!(bad.parse::<BitRate>().is_err(), "{bad}");
        }
    }
}
