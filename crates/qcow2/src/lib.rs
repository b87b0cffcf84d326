//! qcow2, whole: the map, the allocator and the order of metadata writes.

pub mod check;
pub mod entry;
pub mod header;
pub mod layout;
