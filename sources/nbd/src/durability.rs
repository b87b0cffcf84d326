//! What a flush promises after connections were lost.
//!
//! An answered write is durable only after a flush that the same generation of connections answered.
//! If a generation ends while there are answered writes without such a flush, the server may have
//! lost them (it crashed with them in its cache), and nobody keeps their bytes. From then on each
//! flush fails, as after a failed fdatasync. If all answered writes were flushed, or were FUA writes,
//! nothing is lost, and flushes go on, whatever else failed: a flush without a server fails alone.
//!
//! The model in `tests/model_flush` runs this file in every order of a writer, a flush, and the end of
//! a server.

use std::sync::Arc;

/// The generation, and its writes that are not known to be durable.
#[derive(Debug, Default)]
pub(crate) struct Durability {
    /// Counts the generations of connections.
    generation: u64,
    /// Answered writes in all, and those of them that an answered flush covers.
    written: u64,
    flushed: u64,
    /// Why writes may be lost; every later flush fails.
    doubtful: Option<Arc<str>>,
}

impl Durability {
    /// The generation of requests that are sent now.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// What a flush covers that is sent now.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Counts an answered write; `false` if its generation has ended, so the answer does not count.
    pub(crate) fn count_write(&mut self, generation: u64, durable: bool) -> bool {
        let counts = self.generation == generation;
        self.written += u64::from(counts && !durable);
        counts
    }

    /// Counts an answered flush, which covers so many writes; otherwise as
    /// [`Durability::count_write`].
    pub(crate) fn count_flush(&mut self, generation: u64, covers: u64) -> bool {
        let counts = self.generation == generation;
        if counts {
            self.flushed = self.flushed.max(covers);
        }
        counts
    }

    /// Ends a generation; `false` if it has ended before.
    pub(crate) fn end_generation(&mut self, generation: u64, why: &str) -> bool {
        if self.generation != generation {
            return false;
        }
        self.generation += 1;
        if self.written > self.flushed {
            self.doubt(&format!(
                "{why}, before the answered writes were flushed: the server may have lost some of \
                 them"
            ));
        }
        self.flushed = self.written;
        true
    }

    /// Lets every later flush fail.
    pub(crate) fn doubt(&mut self, why: &str) {
        self.doubtful.get_or_insert_with(|| why.into());
    }

    /// Why a flush fails although the server answered it.
    pub(crate) fn doubtful(&self) -> Option<Arc<str>> {
        self.doubtful.clone()
    }
}
