//! Where a field stands in a message, and the one way to read and write it. Offsets are counted as
//! the standard's tables count them: bytes after the MAD's header, bits from the most significant
//! one.
use super::BODY_BYTES;

pub(super) type Body = [u8; BODY_BYTES];

/// A value that has a place in a message.
pub(super) trait Field: Sized {
    fn read(body: &Body, byte: usize, bit: usize, width: usize) -> Self;
    fn write(self, body: &mut Body, byte: usize, bit: usize, width: usize);
}

/// `width` bits from `bit` of `byte` on; 64 at most.
fn bits(body: &Body, byte: usize, bit: usize, width: usize) -> u64 {
    if bit == 0 && width.is_multiple_of(8) {
        return body[byte..byte + width / 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
    }
    let first = byte * 8 + bit;
    (first..first + width).fold(0, |value, at| value << 1 | u64::from(body[at / 8] >> (7 - at % 8) & 1))
}

fn set_bits(body: &mut Body, byte: usize, bit: usize, width: usize, value: u64) {
    if bit == 0 && width.is_multiple_of(8) {
        let bytes = width / 8;
        return body[byte..byte + bytes].copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
    }
    let first = byte * 8 + bit;
    for (place, at) in (first..first + width).rev().enumerate() {
        let mask = 1 << (7 - at % 8);
        body[at / 8] = body[at / 8] & !mask | if value >> place & 1 != 0 { mask } else { 0 };
    }
}

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Field for $type {
            fn read(body: &Body, byte: usize, bit: usize, width: usize) -> Self {
                bits(body, byte, bit, width) as Self
            }

            fn write(self, body: &mut Body, byte: usize, bit: usize, width: usize) {
                set_bits(body, byte, bit, width, u64::from(self));
            }
        }
    )*};
}

number!(u8, u16, u32, u64);

impl Field for bool {
    fn read(body: &Body, byte: usize, bit: usize, width: usize) -> Self {
        bits(body, byte, bit, width) != 0
    }

    fn write(self, body: &mut Body, byte: usize, bit: usize, width: usize) {
        set_bits(body, byte, bit, width, u64::from(self));
    }
}

/// Bytes; their number says the type.
impl<const COUNT: usize> Field for [u8; COUNT] {
    fn read(body: &Body, byte: usize, _bit: usize, _width: usize) -> Self {
        core::array::from_fn(|at| body[byte + at])
    }

    fn write(self, body: &mut Body, byte: usize, _bit: usize, _width: usize) {
        body[byte..byte + COUNT].copy_from_slice(&self);
    }
}

/// A message as a table: field, type, (byte, first bit, width). What no field covers is reserved:
/// written as zero, not read.
macro_rules! message {
    ($(#[$about:meta])* $name:ident { $($(#[$note:meta])* $field:ident: $type:ty = ($byte:expr, $bit:expr, $width:expr),)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "fields of the standard's tables, by its names")]
        pub struct $name {
            $($(#[$note])* pub $field: $type,)*
        }

        impl $name {
            pub(super) fn read(body: &Body) -> Self {
                Self { $($field: <$type as Field>::read(body, $byte, $bit, $width),)* }
            }

            pub(super) fn write(&self, body: &mut Body) {
                $(self.$field.write(body, $byte, $bit, $width);)*
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::read(&[0; $crate::cm::BODY_BYTES])
            }
        }
    };
}

pub(super) use message;
