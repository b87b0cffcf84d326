//! The storage that fails by rules (`blkdebug`).
//!
//! | call | events, in order |
//! |---|---|
//! | read | by what the bytes hold: `read_aio`, `l2_load`, `refblock_load`, `reftable_load` |
//! | write | `write_aio`, `l1_update`, `l2_update`, `refblock_update`, `reftable_update`; then `pwritev`; afterwards `pwritev_done` |
//! | write of zeroes | as write, with `pwritev_zero` |
//! | sync | `flush_to_os`, `flush_to_disk` |
//! | opening | `none` |
//!
//! A new L2 table or refcount block counts as the guest's bytes until something refers to it.
//! QEMU's other events happen within its formats. No storage sees them, and rules for them never
//! count.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use vdkit::{Error, HostOffset, IoAction, Result, SpaceMap, Storage, ZeroMode};

use super::areas::{Area, Areas};
use super::rules::{Kind, Machine, Rules};

/// Passes requests on, unless a rule fails them.
#[derive(Debug)]
pub struct Faulty {
    name: String,
    inner: Arc<dyn Storage>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    machine: Machine,
    areas: Areas,
}

impl Faulty {
    /// The storage before another one. `format` is the user's for the content.
    pub fn new(name: &str, inner: Arc<dyn Storage>, rules: Rules, format: Option<&str>) -> Self {
        let state = State { machine: Machine::new(rules), areas: Areas::of(&*inner, format) };
        Self { name: name.to_owned(), inner, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with it")
    }

    /// Raises events, and fails if a rule says so.
    fn check(
        &self,
        (kind, action): (Kind, IoAction),
        events: &[Option<&str>],
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let mut state = self.state();
        events.iter().flatten().for_each(|event| state.machine.raise(event));
        match state.machine.fails(kind, offset, len) {
            None => Ok(()),
            Some(errno) => {
                let source = io::Error::from_raw_os_error(errno);
                Err(Error::io(&self.name, action, offset, len, source))
            }
        }
    }

    fn write_event(&self, offset: HostOffset) -> Option<&'static str> {
        match self.state().areas.at_write(&*self.inner, offset.0) {
            Area::Other => None,
            Area::L1 => Some("l1_update"),
            Area::L2 => Some("l2_update"),
            Area::RefcountTable => Some("reftable_update"),
            Area::RefcountBlock => Some("refblock_update"),
            Area::Data => Some("write_aio"),
        }
    }

    fn written(&self, offset: HostOffset) {
        let mut state = self.state();
        state.machine.raise("pwritev_done");
        state.areas.written(&*self.inner, offset.0);
    }
}

impl vdkit::StorageLayer for Faulty {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let event = match self.state().areas.at(&*self.inner, offset.0) {
            Area::Other | Area::L1 => None,
            Area::L2 => Some("l2_load"),
            Area::RefcountTable => Some("reftable_load"),
            Area::RefcountBlock => Some("refblock_load"),
            Area::Data => Some("read_aio"),
        };
        self.check((Kind::Read, IoAction::Read), &[event], offset.0, buf.len() as u64)?;
        self.inner.read_up_to(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let events = [self.write_event(offset), Some("pwritev")];
        self.check((Kind::Write, IoAction::Write), &events, offset.0, buf.len() as u64)?;
        self.inner.write_at(buf, offset)?;
        self.written(offset);
        Ok(())
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        let events = [self.write_event(offset), Some("pwritev_zero")];
        self.check((Kind::WriteZeroes, IoAction::WriteZeroes), &events, offset.0, len)?;
        self.inner.write_zeroes(offset, len, mode)?;
        self.written(offset);
        Ok(())
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.check((Kind::Discard, IoAction::Discard), &[], offset.0, len)?;
        self.inner.discard(offset, len)
    }

    fn sync(&self) -> Result<()> {
        // A target whose cache mode is unsafe is not flushed.
        if self.inner.caps().volatile {
            return self.inner.sync();
        }
        let events = [Some("flush_to_os"), Some("flush_to_disk")];
        self.check((Kind::Flush, IoAction::Sync), &events, 0, 0)?;
        self.inner.sync()
    }

    fn space_map(&self) -> Option<&dyn SpaceMap> {
        // QEMU's driver reports no holes beneath a format.
        None
    }
}
