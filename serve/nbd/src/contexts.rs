//! Metadata contexts of block status: allocation, depth of the chain, dirty bitmaps.

use std::sync::{Arc, OnceLock};

use vdkit_block::{Error, GuestOffset, Result};
use vdkit_chain::{Disk, DiskPlace};
use vdkit_serve::Export;

use crate::dirty::DirtyBits;

const ALLOCATION: &str = "base:allocation";
const DEPTH: &str = "qemu:allocation-depth";
const BITMAP: &str = "qemu:dirty-bitmap:";

/// Maximum map extents walked per reply. Neighbors are merged, so a reply with few runs may cover
/// any number of extents. The protocol lets a reply describe less than requested.
const EXTENTS_MAX: usize = 64 << 10;

/// Flags of `base:allocation`.
const HOLE: u64 = 1;
const ZERO: u64 = 2;
/// Flag of `qemu:dirty-bitmap`.
const DIRTY: u64 = 1;

/// A metadata context.
#[derive(Clone, Debug)]
pub enum Context {
    /// `base:allocation`: whether bytes are allocated, and whether they read as zero.
    Allocation,
    /// `qemu:allocation-depth`: 0 for unallocated, 1 for the image itself, n for its (n-1)th
    /// backing image.
    Depth,
    /// `qemu:dirty-bitmap:NAME`: dirty ranges.
    Bitmap(BitmapView),
}

/// A bitmap as of the client's first query, so that one backup sees one state.
#[derive(Clone, Debug)]
pub struct BitmapView {
    name: String,
    /// The image that holds it. After a commit or a snapshot the served image may have no such
    /// bitmap, or another of the same name.
    image: String,
    dirty: Arc<OnceLock<DirtyBits>>,
}

impl BitmapView {
    fn dirty(&self, disk: &Disk) -> Result<&DirtyBits> {
        if let Some(dirty) = self.dirty.get() {
            return Ok(dirty);
        }
        let bitmaps = disk.top().bitmaps().filter(|_| disk.name() == self.image);
        let Some(bitmaps) = bitmaps else {
            let (name, image, now) = (&self.name, &self.image, disk.name());
            return Err(Error::invalid(format!(
                "bitmap '{name}' is in {image}, and {now} is served now; what changed is not known"
            )));
        };
        let all = bitmaps.list()?;
        let own = all.iter().find(|bitmap| bitmap.info.name == self.name);
        let mut found = DirtyBits::new(own.map_or(64 << 10, |bitmap| bitmap.info.granularity));
        bitmaps.for_each_dirty(&self.name, &mut |run| {
            found.mark(run);
            Ok(())
        })?;
        Ok(self.dirty.get_or_init(|| found))
    }
}

impl Context {
    /// The name in the protocol.
    pub fn name(&self) -> String {
        match self {
            Self::Allocation => ALLOCATION.to_owned(),
            Self::Depth => DEPTH.to_owned(),
            Self::Bitmap(view) => format!("{BITMAP}{}", view.name),
        }
    }

    /// Calls `found` with length and flags of each run from `at`, neighbors merged. Ends at the
    /// end of the range, when `found` returns `false`, or after the maximum number of extents, so
    /// that the disk is unlocked in between.
    ///
    /// # Errors
    /// Damage; errors of storages.
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
                while let Some(run) = dirty.first_in(at..end).filter(|_| !runs.done) {
                    runs.push(run.start - at, 0);
                    runs.push(run.end - run.start, DIRTY);
                    at = run.end;
                }
                runs.push(end - at, 0);
            }
            Self::Allocation | Self::Depth => {
                for extent in disk.extents(GuestOffset(at), len)?.take(EXTENTS_MAX) {
                    let extent = extent?;
                    let flags = match (self, extent.place) {
                        (Self::Depth, DiskPlace::Hole) => 0,
                        // Bytes hidden by the end of a shorter image are unallocated.
                        (Self::Depth, DiskPlace::Zero { allocated: false }) if extent.depth > 0 => {
                            0
                        }
                        (Self::Depth, _) => extent.depth as u64 + 1,
                        (_, DiskPlace::Data { .. } | DiskPlace::Compressed { .. }) => 0,
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

/// Merges neighbors.
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

/// The contexts of an export that match the queries, each once. Setting takes exact names only.
/// Listing also takes the prefixes `namespace:` and `qemu:dirty-bitmap:`, and an empty list for
/// all.
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
