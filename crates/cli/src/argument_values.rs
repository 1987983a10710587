//! Values in the command line that have a form of their own.

use freeflow_protocol::admin::OWN_LABELS;

const MILLION: f64 = 1e6;
const DEVICE_UNIT: u64 = 2 << 20;
const DEVICE_SMALLEST: u64 = 16 << 20;
const DEVICE_LARGEST: u64 = 1 << 40;

/// `KEY=VALUE`; the router says what else is wrong with it.
pub fn parse_label(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, _)) if OWN_LABELS.contains(&key) => Err(format!("freeflow itself uses the label {key}")),
        Some((key, value)) if !key.is_empty() => Ok((key.to_string(), value.to_string())),
        _ => Err("write KEY=VALUE".into()),
    }
}

/// A share such as `0.1%` or `0.001`, in parts per million.
pub fn parse_share(text: &str) -> std::result::Result<u32, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number, MILLION / 100.0),
        None => (text, MILLION),
    };
    let value: f64 = number.trim().parse().map_err(|_| "not a share, like 0.1% or 0.001".to_string())?;
    if !(0.0..=MILLION / unit).contains(&value) {
        return Err("a share is between 0 and 100%".into());
    }
    Ok((value * unit).round() as u32)
}

/// A time such as `50us`, `1.5ms`, `2s`, in nanoseconds; at most a minute.
pub fn parse_time(text: &str) -> std::result::Result<u64, String> {
    let units = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    let (number, unit) = units
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
        .ok_or("a time has a unit: ns, us, ms or s")?;
    let value: f64 = number.trim().parse().map_err(|_| "not a time, like 50us".to_string())?;
    if !(0.0..=60e9).contains(&(value * unit)) {
        return Err("a delay is at most a minute".into());
    }
    Ok((value * unit) as u64)
}

/// Size of a shared-memory device: a number of bytes, `64M`, `1G`; from 16 MiB to 1 TiB, in whole multiples of 2 MiB.
pub fn parse_device_size(text: &str) -> std::result::Result<u64, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'M') => (&text[..text.len() - 1], 1 << 20),
        Some(b'G') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    match bytes {
        Some(bytes) if (DEVICE_SMALLEST..=DEVICE_LARGEST).contains(&bytes) && bytes.is_multiple_of(DEVICE_UNIT) => {
            Ok(bytes)
        }
        _ => Err("write 16M to 1024G, in whole multiples of 2M".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_parsed_and_ours_are_ours() {
        assert_eq!(parse_label("a=b=c").unwrap(), ("a".to_string(), "b=c".to_string()));
        assert_eq!(parse_label("a=").unwrap().1, "");
        for bad in ["", "a", "=b", "engine=oci", "pid=1"] {
            assert!(parse_label(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares_and_times_are_read() {
        assert_eq!(parse_share("0.1%"), Ok(1000));
        assert_eq!(parse_share("0.5"), Ok(500_000));
        assert_eq!(parse_share("100%"), Ok(1_000_000));
        assert!(parse_share("101%").is_err() && parse_share("-1%").is_err() && parse_share("x").is_err());
        assert_eq!(parse_time("50us"), Ok(50_000));
        assert_eq!(parse_time("1.5ms"), Ok(1_500_000));
        assert_eq!(parse_time("7ns"), Ok(7));
        assert!(parse_time("50").is_err() && parse_time("2h").is_err() && parse_time("61s").is_err());
    }

    #[test]
    fn sizes_are_read_and_those_that_no_device_has_are_refused() {
        assert_eq!(parse_device_size("16M"), Ok(16 << 20));
        assert_eq!(parse_device_size("1G"), Ok(1 << 30));
        assert_eq!(parse_device_size("1024G"), Ok(1 << 40));
        assert_eq!(parse_device_size("18874368"), Ok(18 << 20));
        for wrong in ["", "G", "0", "14M", "17M", "1025G", "1T", "-1G", "99999999999G", "1.5G"] {
            assert!(parse_device_size(wrong).is_err(), "{wrong}");
        }
    }
}
