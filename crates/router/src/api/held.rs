//! An answer of which something is kept until it is sent.
use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::OwnedSemaphorePermit;

/// Pieces in which it goes out, so that it ends when the reader is gone.
const CHUNK_BYTES: usize = 256 << 10;

pub struct Held {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl Held {
    pub fn new(bytes: Bytes, permit: OwnedSemaphorePermit) -> Self {
        Self { bytes, _permit: permit }
    }
}

impl Body for Held {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.bytes.is_empty() {
            return Poll::Ready(None);
        }
        let count = self.bytes.len().min(CHUNK_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.bytes.split_to(count)))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}
