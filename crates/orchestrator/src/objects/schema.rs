//! JSON schemas of the quantities, which do not derive theirs.
use super::{BitRate, ByteCount, MessageRate};
use alloc::borrow::Cow;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

macro_rules! quantity {
    ($name:ident, $description:literal, $example:literal) => {
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "description": $description,
                    "type": ["string", "integer"],
                    "minimum": 1,
                    "examples": [$example],
                })
            }
        }
    };
}

quantity!(BitRate, "A rate: a number and bit, kbit, Mbit or Gbit, or bits per second.", "500Mbit");
quantity!(ByteCount, "A size: a number and B, KiB, MiB, GiB or TiB, or bytes.", "64KiB");
quantity!(MessageRate, "Messages per second: a number, maybe with k or M.", "200k");
