//! Result of a map lookup: the location of a run of guest bytes.

use crate::codec::Codec;
use crate::units::HostOffset;

/// Index of one of a format's storages; 0 is its first data storage. See [`crate::Format::file`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileIndex(pub u16);

/// A run of guest bytes at one location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes from the requested offset; never 0, never more than requested.
    pub len: u64,
    /// The location.
    pub place: Place,
}

/// Location of guest bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Uncompressed bytes in a host file, contiguous for the whole extent.
    Data {
        /// The storage.
        file: FileIndex,
        /// Host offset of the first byte.
        offset: HostOffset,
        /// Not shared, so the bytes may be overwritten in place.
        exclusive: bool,
    },
    /// The bytes read as zero and hide the backing image.
    Zero {
        /// Host space is allocated nevertheless.
        allocated: bool,
    },
    /// Not in this image: read the backing image, or zero if there is none.
    Hole,
    /// Compressed; the extent ends with the compressed unit.
    Compressed(Compressed),
}

/// One compressed unit (a cluster, a grain).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// The storage.
    pub file: FileIndex,
    /// Host offset of the first compressed byte.
    pub offset: HostOffset,
    /// Upper bound of the compressed length in bytes; the stream may end earlier.
    pub len: u32,
    /// Compression method.
    pub codec: Codec,
    /// Bytes of the decompressed unit.
    pub unpacked_len: u32,
    /// Offset of the extent's first byte in the decompressed unit.
    pub skip: u32,
}

impl Extent {
    /// This extent without its first `bytes`, which must be less than [`Extent::len`].
    pub fn advance(self, bytes: u64) -> Self {
        debug_assert!(bytes < self.len);
        let place = match self.place {
            Place::Data { file, offset, exclusive } => {
                Place::Data { file, offset: offset + bytes, exclusive }
            }
            // Compressed units are at most a few MiB, so the sum fits in u32.
            Place::Compressed(p) => {
                Place::Compressed(Compressed { skip: p.skip + bytes as u32, ..p })
            }
            other => other,
        };
        Self { len: self.len - bytes, place }
    }

    /// Merges the extents if `next` directly follows `self` both for the guest and on the host.
    pub fn merge(self, next: Self) -> Option<Self> {
        let joined = match (self.place, next.place) {
            (
                Place::Data { file: a, offset, exclusive: x },
                Place::Data { file: b, offset: next_offset, exclusive: y },
            ) => a == b && x == y && offset.checked_add(self.len) == Some(next_offset),
            (Place::Zero { allocated: a }, Place::Zero { allocated: b }) => a == b,
            (Place::Hole, Place::Hole) => true,
            _ => false,
        };
        joined.then(|| Self { len: self.len + next.len, place: self.place })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(offset: u64, len: u64) -> Extent {
        Extent {
            len,
            place: Place::Data { file: FileIndex(0), offset: HostOffset(offset), exclusive: true },
        }
    }

    #[test]
    fn only_neighbors_on_the_host_merge() {
        assert_eq!(data(0, 512).merge(data(512, 512)), Some(data(0, 1024)));
        assert_eq!(data(0, 512).merge(data(1024, 512)), None);
        let zero = Extent { len: 5, place: Place::Zero { allocated: false } };
        assert_eq!(data(0, 512).merge(zero), None);
        assert_eq!(zero.merge(zero).map(|e| e.len), Some(10));
        assert_eq!(data(u64::MAX, 1).merge(data(0, 1)), None);
    }

    #[test]
    fn advance_moves_the_host_offset() {
        assert_eq!(data(4096, 100).advance(40), data(4136, 60));
    }
}
