//! For tests: ordinary memory of a tenant that can be made to block.
use crate::memory::slow_path::TenantMemory;
use std::io;
use std::sync::{Condvar, Mutex};

/// Reads give the low byte of the address.
#[derive(Default)]
pub(crate) struct BlockingMemory {
    blocks: Mutex<bool>,
    changed: Condvar,
}

impl BlockingMemory {
    pub fn set_blocking(&self, blocks: bool) {
        *self.blocks.lock().unwrap() = blocks;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let blocks = self.blocks.lock().unwrap();
        drop(self.changed.wait_while(blocks, |blocks| *blocks).unwrap());
    }
}

impl TenantMemory for BlockingMemory {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        self.pass();
        into.fill(address as u8);
        Ok(())
    }

    fn write(&self, _: &[u8], _: u64) -> io::Result<()> {
        self.pass();
        Ok(())
    }
}
