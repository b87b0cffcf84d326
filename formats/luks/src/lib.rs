//! LUKS version 1, for encrypted qcow2 images and for raw containers.
//!
//! A passphrase never encrypts data. It opens a *key slot*, which holds the image's random key,
//! encrypted and split; eight slots hold the same key for eight passphrases. So a passphrase can be
//! changed without rewriting the data.
//!
//! ```text
//!   passphrase ── PBKDF2 (salt, iterations) ──► key of the slot's material
//!                                                      │
//!   key material ── decrypt ── merge 4000 stripes ──► image's key ── PBKDF2 ──► digest equal?
//!                                                      │
//!   sector number ── IV ──────► AES ◄──────────────────┘
//! ```
//!
//! | what | where |
//! |---|---|
//! | the header, validated from untrusted bytes | `header` |
//! | opening, adding and wiping key slots, and the order of writes | `slots` |
//! | new headers and their options | `new` |
//! | AES-XTS and AES-CBC over sectors | `cipher` |
//! | splitting a key into 4000 stripes | `af` |
//! | raw containers: map and driver | `format`, `driver` |
//!
//! The data movers encrypt and decrypt: see [`vdkit_block::Encryption`].

mod af;
mod cipher;
mod driver;
mod format;
mod hash;
mod header;
mod new;
mod on_disk;
mod slots;

pub use cipher::{AesSectors, decrypt_cbc_padded, legacy_qcow2};
pub use driver::LuksDriver;
pub use header::{HEADER_BYTES, Header, HeaderPlace, SLOTS};
pub use new::{INNER_OPTIONS, MadeHeader, NewHeader};
pub use slots::LuksSlots;
