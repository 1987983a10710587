//! Control channels of virtual machines: streams of frames either way, and the kinds of replies.
use freeflow_protocol::DecodeError;
use freeflow_protocol::guest::{Frames, FromGuest, ToGuest, descriptors_of};
use std::fmt::Debug;

type Take<M> = fn(&mut Frames) -> Result<Option<M>, DecodeError>;

pub fn run(bytes: &[u8]) {
    let Some((kind, stream)) = bytes.split_first() else { return };
    match kind % 3 {
        0 => look_at(stream, Frames::take::<FromGuest>),
        1 => look_at(stream, Frames::take::<ToGuest>),
        _ => assert!(descriptors_of(stream).is_none_or(|kinds| kinds.len() <= 2)),
    }
}

/// Messages do not depend on the pieces in which their bytes come.
fn look_at<M: PartialEq + Debug>(stream: &[u8], take: Take<M>) {
    let whole = taken(stream, stream.len().max(1), take);
    assert_eq!(taken(stream, 7, take), whole);
}

/// All messages, and whether the stream ended with them.
fn taken<M>(stream: &[u8], piece: usize, take: Take<M>) -> (Vec<M>, bool) {
    let (mut frames, mut messages) = (Frames::default(), Vec::new());
    for piece in stream.chunks(piece) {
        frames.push(piece);
        loop {
            match take(&mut frames) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, true),
            }
        }
    }
    (messages, false)
}
