//! LUKS version 1: what is inside encrypted qcow2 images, and containers of their own.
//!
//! A passphrase never encrypts data. It opens a *key slot*, in which the image's own random key
//! lies, encrypted and spread out; eight slots hold the same key for eight passphrases. So a
//! passphrase is changed without touching the data.
//!
//! ```text
//!   passphrase ── PBKDF2 (salt, iterations) ──► key of the slot's material
//!                                                      │
//!   key material ── decrypt ── merge 4000 stripes ──► image's key ── PBKDF2 ──► digest equal?
//!                                                      │
//!   sector number ── vector ──► AES ◄──────────────────┘
//! ```
//!
//! | what | where |
//! |---|---|
//! | the header, every field of a stranger's checked | `header` |
//! | opening, adding and wiping key slots, and the order of writes | `slots` |
//! | new headers and their options | `new` |
//! | AES-XTS and AES-CBC over sectors | `cipher` |
//! | spreading a key over 4000 stripes | `af` |
//! | raw containers: the map and the front door | `format`, `driver` |
//!
//! Data is encrypted by whoever moves it: see [`vdkit_block::Encryption`].

mod af;
mod cipher;
mod driver;
mod format;
mod hash;
mod header;
mod new;
mod slots;

pub use cipher::{AesSectors, CipherSpec, Mode, Vector, legacy_qcow2};
pub use driver::LuksDriver;
pub use format::LuksFormat;
pub use hash::Hash;
pub use header::{HEADER_BYTES, Header, HeaderPlace, MAGIC, SLOTS};
pub use new::{INNER_OPTIONS, ITER_TIME_DEFAULT, MadeHeader, NewHeader};
pub use slots::LuksSlots;
