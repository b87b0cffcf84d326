//! An NBD server over an image in memory, and a client that sends exactly what a test wants, valid or
//! not.

pub mod client;
mod rig;

pub use rig::Rig;
