//! An NBD server over an image in memory, and a client of our own that says exactly what a test
//! wants, right or wrong.

pub mod client;
mod rig;

pub use rig::Rig;
