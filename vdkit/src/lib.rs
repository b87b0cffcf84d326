//! vdkit, a virtual-disk engine: reads, writes, converts, checks and compares disk images.
//!
//! Programs import this crate; it re-exports vdkit's other crates.
//!
//! | what | where |
//! |---|---|
//! | one flat disk over a chain of images | [`Disk`], [`OpenOptions`]; as a file: [`Disk::stream`] |
//! | an image's metadata | [`describe_chain`], [`ImageInfo`] |
//! | jobs: convert, compare, check, create, resize, measure | [`jobs`] |
//! | a disk for a running guest: the common part of all servers, NBD, and vhost-user | `serve`, `nbd`, `vhost_user` (features) |
//! | the formats and their options | [`FORMATS`], [`registry`], [`FormatDriver`] |
//! | storages of images: files, devices and memory | [`storage`], [`Storage`] |
//! | exports of NBD servers, as images and as storages | `nbd_client` (feature) |
//! | appliances (OVA): disks in one tar file | [`ova`], [`jobs::extract`], [`jobs::pack`] |
//! | errors, and their classes, from which exit codes derive | [`Error`], [`ErrorKind`] |
//!
//! # Creating, writing and reading an image
//! ```
//! use vdkit::jobs::{CreateOptions, create};
//! use vdkit::{Disk, GuestOffset, Monitor, OpenOptions};
//!
//! # fn main() -> vdkit::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.qcow2");
//! let registry = vdkit::registry();
//! let new = CreateOptions::new(&path, vdkit::format("qcow2")?).guest_bytes(64 << 20);
//! create(&registry, &new, &Monitor::default())?;
//!
//! let disk = Disk::open(&registry, &path, &OpenOptions::read_write())?;
//! disk.write_at(b"hello", GuestOffset(1 << 20))?;
//! disk.flush()?;
//!
//! let mut bytes = [0; 7];
//! disk.read_at(&mut bytes, GuestOffset((1 << 20) - 1))?;
//! assert_eq!(&bytes, b"\0hello\0");
//! # Ok(())
//! # }
//! ```
//! More of this kind is in `docs/library.md`, and each job has a program in `examples/`.
//!
//! # Images are untrusted
//! Opening an image reads only its header and top table, follows references only as far as
//! [`OpenOptions::refs`] allows, and locks files as QEMU does. A damaged or hostile image causes an
//! error with the location of the damage.
//!
//! # Describing, without opening other files
//! ```
//! use vdkit::{BackingChoice, OpenOptions};
//!
//! # fn main() -> vdkit::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.img");
//! # std::fs::write(&path, [0; 1024]).unwrap();
//! let options = OpenOptions::read_only().backing(BackingChoice::Ignore);
//! let report = vdkit::describe_chain(&vdkit::registry(), &path, &options)?;
//! assert_eq!(report.links[0].info.format, "raw");
//! assert_eq!(report.links[0].info.virtual_size, 1024);
//! # Ok(())
//! # }
//! ```
//!
//! # Converting
//! ```
//! use vdkit::jobs::{CompareOptions, ConvertOptions, Destination, NewImage, Source, compare, convert};
//! use vdkit::{Disk, Monitor, OpenOptions};
//!
//! # fn main() -> vdkit::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let (from, to) = (folder.path().join("disk.raw"), folder.path().join("disk.qcow2"));
//! # std::fs::write(&from, vec![7; 1 << 20]).unwrap();
//! let registry = vdkit::registry();
//! let source = Source::new(vec![Disk::open(&registry, &from, &OpenOptions::read_only())?]);
//! let options = ConvertOptions::new(Destination::New(NewImage::new(&to, "qcow2")));
//! convert(&registry, &source, &options, &Monitor::default())?;
//!
//! let made = Disk::open(&registry, &to, &OpenOptions::read_only())?;
//! let options = CompareOptions::default();
//! assert!(compare(&source.disks()[0], &made, &options, &Monitor::default())?.identical);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Monitor`] holds a job's progress sink and cancel token.
//!
//! # Features
//! None is on by default: disks and jobs need none.
//!
//! | feature | what it adds |
//! |---|---|
//! | `serve` | `nbd`, `serve`, `live`: NBD servers, and images exchanged under a served disk |
//! | `fuse` | `fuse`: a disk as a file |
//! | `vhost` | `vhost_user`: virtio disks over shared memory |
//! | `nbd-client` | `nbd_client`, and NBD URIs as names of images |
//! | `http` | images at HTTP and HTTPS addresses, in [`stream`] |
//! | `tls` | NBD over TLS with certificates, in servers and clients that are on |
//! | `tls-psk` | the same with pre-shared keys, by a second TLS library |

pub use vdkit_block::*;
pub use vdkit_chain::*;
#[cfg(feature = "fuse")]
pub use vdkit_fuse as fuse;
#[cfg(feature = "serve")]
pub use vdkit_nbd as nbd;
#[cfg(feature = "nbd-client")]
pub use vdkit_nbd_client as nbd_client;
pub use vdkit_ova as ova;
#[cfg(feature = "serve")]
pub use vdkit_serve as serve;
pub use vdkit_storage as storage;
pub use vdkit_stream as stream;
#[cfg(feature = "vhost")]
pub use vdkit_vhost as vhost_user;

/// Long work on images: each job reports to a [`Monitor`] and returns a report that serializes to JSON.
pub mod jobs {
    pub use vdkit_appliance::*;
    pub use vdkit_copy::*;
    pub use vdkit_doctor::*;
    pub use vdkit_image::*;
    pub use vdkit_inspect::{Objection, Preset, Rule, Use, ValidateReport, validate};
    pub use vdkit_tree::*;
    pub use {vdkit_inspect as inspect, vdkit_libvirt as libvirt};
}
#[cfg(feature = "serve")]
pub mod live;
mod registry;

pub use registry::{FORMATS, format, format_of_name, registry};
pub use vdkit_luks::decrypt_cbc_padded;
pub use vdkit_vhd::azure_faults;
