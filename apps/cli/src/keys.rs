//! Keys of encrypted images on the command line. A key is never an argument itself, because every
//! process on the machine can read the arguments.

use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueHint};
use vdkit::{BackingChoice, OpenOptions, Secret, plain};

use crate::failure::Failure;

/// Longest key that is read, as in cryptsetup.
const KEY_BYTES_MAX: usize = 8 << 20;

/// Keys of images that exist.
#[derive(Args, Clone, Debug, Default)]
pub struct Keys {
    /// Key of an encrypted image: every byte of FILE, including a final line end (repeatable)
    ///
    /// If several images are encrypted (an image and its backing images), give all keys. Each image
    /// is opened with the first key that fits.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = from_file())]
    pub key_file: Vec<Secret>,
    /// As --key-file, from the open file descriptor N: a file or a pipe
    #[arg(long, value_name = "N", value_parser = from_fd)]
    pub key_fd: Vec<Secret>,
    /// As --key-file, from the environment variable NAME
    #[arg(long, value_name = "NAME", value_parser = from_env)]
    pub key_env: Vec<Secret>,
    /// Limit of the work for trying a key, in rounds of its derivation; an image that needs more is
    /// refused
    #[arg(long, value_name = "N")]
    pub key_rounds: Option<u64>,
}

impl Keys {
    /// All keys, in the order in which they are tried.
    pub fn all(&self) -> Vec<Secret> {
        [&self.key_file, &self.key_fd, &self.key_env].into_iter().flatten().cloned().collect()
    }

    /// Adds the keys to options for opening an image.
    pub fn apply(&self, mut options: OpenOptions) -> OpenOptions {
        if let Some(rounds) = self.key_rounds {
            options.limits.key_rounds_max = rounds;
        }
        options.keys(self.all())
    }
}

/// Defines the options of one key, as a file, a file descriptor or an environment variable.
macro_rules! one_key {
    ($(#[$about:meta])* $name:ident, $what:literal: $file:ident $option:literal, $fd:ident, $env:ident) => {
        $(#[$about])*
        #[derive(Args, Clone, Debug, Default)]
        pub struct $name {
            #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, value_parser = from_file())]
            #[arg(help = concat!($what, ": every byte of FILE"))]
            $file: Option<Secret>,
            #[arg(long, value_name = "N", value_parser = from_fd, conflicts_with = stringify!($file))]
            #[arg(help = concat!("As ", $option, ", from the open file descriptor N"))]
            $fd: Option<Secret>,
            #[arg(long, value_name = "NAME", value_parser = from_env)]
            #[arg(conflicts_with_all = [stringify!($file), stringify!($fd)])]
            #[arg(help = concat!("As ", $option, ", from the environment variable NAME"))]
            $env: Option<Secret>,
        }

        impl $name {
            pub fn key(&self) -> Option<&Secret> {
                [&self.$file, &self.$fd, &self.$env].into_iter().find_map(Option::as_ref)
            }
        }
    };
}

one_key! {
    /// Key of the target, for commands that also read another image.
    TargetKey, "Key of an encrypted target": target_key_file "--target-key-file", target_key_fd, target_key_env
}

one_key! {
    /// Key of a new image.
    NewImageKey, "Key of a new encrypted image": key_file "--key-file", key_fd, key_env
}

one_key! {
    /// The new key of an image that already has one.
    NewKey, "The new key": new_key_file "--new-key-file", new_key_fd, new_key_env
}

impl TargetKey {
    /// Refuses a key for an existing target that is not encrypted: who gives one expects that what
    /// is written there is encrypted.
    pub fn refuse_for_plain(&self, target: &Path, format: Option<&str>) -> Result<(), Failure> {
        if self.key().is_none() {
            return Ok(());
        }
        let options = OpenOptions::read_only()
            .maybe_format(format.map(str::to_owned))
            .backing(BackingChoice::Ignore);
        let chain = vdkit::describe_chain(&vdkit::registry(), target, &options)?;
        chain.expect_encrypted().map_err(|error| {
            let hint = "the key of its backing image, if it has one, is given with --key-file";
            Failure::from(error).hint(hint)
        })
    }
}

fn from_file() -> impl TypedValueParser<Value = Secret> {
    PathBufValueParser::new().try_map(|path: PathBuf| {
        let file =
            File::open(&path).map_err(|error| format!("cannot open it: {}", plain(&error)))?;
        read(file)
    })
}

fn from_fd(text: &str) -> Result<Secret, String> {
    let number: u32 = text.parse().map_err(|_| "a file descriptor is a number".to_owned())?;
    let file = File::open(format!("/proc/self/fd/{number}"))
        .map_err(|error| format!("cannot open it: {}", plain(&error)))?;
    read(file)
}

fn from_env(name: &str) -> Result<Secret, String> {
    match std::env::var_os(name) {
        Some(value) => nonempty(Secret::new(value.into_vec())),
        None => Err("the environment has no such variable".to_owned()),
    }
}

fn read(file: File) -> Result<Secret, String> {
    let secret = Secret::read(file, KEY_BYTES_MAX);
    nonempty(secret.map_err(|error| format!("cannot read it: {}", plain(&error)))?)
}

fn nonempty(secret: Secret) -> Result<Secret, String> {
    if secret.bytes().is_empty() { Err("it is empty".to_owned()) } else { Ok(secret) }
}
