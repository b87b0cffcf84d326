//! What block status tells: allocation, depth of the chain, dirty bitmaps.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use vdkit_block::{Error, GuestOffset, Result};
use vdkit_chain::{Disk, DiskPlace};
use vdkit_export::Export;

const ALLOCATION: &str = "base:allocation";
const DEPTH: &str = "qemu:allocation-depth";
const BITMAP: &str = "qemu:dirty-bitmap:";

/// Pieces of the image's map that are walked for one reply. Neighbours are joined, so a reply of few
/// runs can stand for any number of pieces; the protocol lets a reply describe less than was asked.
const EXTENTS_MAX: usize = 64 << 10;

/// Flags of `base:allocation`.
const HOLE: u64 = 1;
const ZERO: u64 = 2;
/// Flag of `qemu:dirty-bitmap`.
const DIRTY: u64 = 1;

/// What a context tells about.
#[derive(Clone, Debug)]
pub enum Context {
    /// `base:allocation`: whether bytes are allocated, and whether they read as zero.
    Allocation,
    /// `qemu:allocation-depth`: 0 nowhere, 1 in the image itself, n in the one n-1 beneath it.
    Depth,
    /// `qemu:dirty-bitmap:NAME`: what the bitmap has marked.
    Bitmap(BitmapView),
}

/// A bitmap as it was when the client first asked about it, so that one backup sees one state.
#[derive(Clone, Debug)]
pub struct BitmapView {
    name: String,
    /// The image that has it. One that is served later, after a commit or a snapshot, may have none, or
    /// another one of the same name.
    image: String,
    dirty: Arc<OnceLock<Vec<Range<u64>>>>,
}

impl BitmapView {
    fn dirty(&self, disk: &Disk) -> Result<&[Range<u64>]> {
        if let Some(dirty) = self.dirty.get() {
            return Ok(dirty);
        }
        let bitmaps = disk.top().bitmaps().filter(|_| disk.name() == self.image);
        let Some(bitmaps) = bitmaps else {
            let (name, image, now) = (&self.name, &self.image, disk.name());
            return Err(Error::Invalid(format!(
                "bitmap '{name}' is in {image}, and {now} is served now; what changed is not known"
            )));
        };
        let mut found: Vec<Range<u64>> = Vec::new();
        bitmaps.for_each_dirty(&self.name, &mut |run| {
            match found.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => found.push(run),
            }
            Ok(())
        })?;
        Ok(self.dirty.get_or_init(|| found))
    }
}

impl Context {
    /// The name on the wire.
    pub fn name(&self) -> String {
        match self {
            Self::Allocation => ALLOCATION.to_owned(),
            Self::Depth => DEPTH.to_owned(),
            Self::Bitmap(view) => format!("{BITMAP}{}", view.name),
        }
    }

    /// Calls `found` with length and flags of each run from `at` on, neighbours joined, until the
    /// range ends, `found` has enough and says `false`, or so much of the map has been walked that the
    /// disk must be given back.
    ///
    /// # Errors
    /// Damage, and what storages return.
    pub fn status(
        &self,
        disk: &Disk,
        at: u64,
        len: u64,
        found: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        let mut runs = Runs { found, len: 0, flags: 0, done: false };
        match self {
            Self::Bitmap(view) => {
                let end = at + len;
                let mut at = at;
                let dirty = view.dirty(disk)?;
                let first = dirty.partition_point(|run| run.end <= at);
                for run in &dirty[first..] {
                    if run.start >= end || runs.done {
                        break;
                    }
                    let start = run.start.max(at);
                    runs.push(start - at, 0);
                    runs.push(run.end.min(end) - start, DIRTY);
                    at = run.end.min(end);
                }
                runs.push(end - at, 0);
            }
            Self::Allocation | Self::Depth => {
                for extent in disk.extents(GuestOffset(at), len)?.take(EXTENTS_MAX) {
                    let extent = extent?;
                    let flags = match (self, extent.place) {
                        (Self::Depth, DiskPlace::Hole) => 0,
                        // What a shorter image hides beneath its end is allocated nowhere.
                        (Self::Depth, DiskPlace::Zero { allocated: false }) if extent.depth > 0 => {
                            0
                        }
                        (Self::Depth, _) => extent.depth as u64 + 1,
                        (_, DiskPlace::Data { .. } | DiskPlace::Packed { .. }) => 0,
                        (_, DiskPlace::Zero { allocated: true }) => ZERO,
                        (_, DiskPlace::Zero { allocated: false } | DiskPlace::Hole) => ZERO | HOLE,
                    };
                    runs.push(extent.len, flags);
                    if runs.done {
                        break;
                    }
                }
            }
        }
        runs.end();
        Ok(())
    }
}

/// Joins neighbours.
struct Runs<'a> {
    found: &'a mut dyn FnMut(u64, u64) -> bool,
    len: u64,
    flags: u64,
    done: bool,
}

impl Runs<'_> {
    fn push(&mut self, len: u64, flags: u64) {
        if len == 0 || self.done {
            return;
        }
        if flags != self.flags {
            self.end();
            self.flags = flags;
        }
        self.len += len;
    }

    fn end(&mut self) {
        if self.len > 0 && !self.done {
            self.done = !(self.found)(self.len, self.flags);
        }
        self.len = 0;
    }
}

/// The contexts of an export that queries ask for, each once. Setting takes exact names only;
/// listing takes `namespace:` and `qemu:dirty-bitmap:` for all beneath, and no query for all.
pub fn matching(export: &Export, queries: &[String], setting: bool) -> Vec<Context> {
    let image = export.filename();
    let bitmap =
        |name| Context::Bitmap(BitmapView { name, image: image.clone(), dirty: Arc::default() });
    let all = [Context::Allocation, Context::Depth]
        .into_iter()
        .chain(export.offered_bitmaps().into_iter().map(bitmap));
    all.filter(|context| {
        let name = context.name();
        queries.iter().any(|query| {
            *query == name || !setting && query.ends_with(':') && name.starts_with(query.as_str())
        }) || queries.is_empty() && !setting
    })
    .collect()
}
