//! The command's tests: a file for each subcommand, and for what concerns several. They are one program,
//! which is linked once. Those that need a process of their own are programs beside it.

#[path = "../common/mod.rs"]
mod common;

mod amend;
mod appliance;
mod bitmap;
mod cache_modes;
mod check;
mod command;
mod commit;
mod compact;
mod compare;
mod completions;
mod convert;
mod convert_existing;
mod convert_streams;
mod coverage;
mod create;
mod ctl;
mod dd;
mod devices;
mod doctor;
mod encrypted;
mod first_contact;
mod formats;
mod info;
mod inspect;
mod key;
mod live;
mod man;
mod map;
mod measure;
mod messages;
mod mount;
mod mount_data;
mod nbd_client;
mod qemu_img;
mod qemu_names;
mod qemu_nbd;
mod qemu_targets;
mod read;
mod rebase;
mod reflink;
mod replacing;
mod resize;
mod serve;
mod serve_tls;
mod snapshot;
mod top;
mod tree;
mod validate;
mod vhd;
mod vhdx;
mod write;
