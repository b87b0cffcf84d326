//! Storages that wrap another storage.

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::capabilities::{
    AccessExchange, GuestDiscard, InitialWrites, KernelCopy, ReadPaths, SpaceMap,
};
use crate::error::Result;
use crate::storage::{Storage, StorageCaps, ZeroMode};
use crate::units::HostOffset;

/// One list of methods makes both the trait and its implementation of [`Storage`], so that neither
/// can lack a method of the other. The lint fails if the list lacks a method of [`Storage`].
macro_rules! layer {
    (
        core { $(fn $method:ident(&self $(, $argument:ident: $type:ty)*) -> $returns:ty;)* }
        capabilities { $(fn $query:ident(&self) -> $capability:ty;)* }
    ) => {
        /// A storage that wraps another one. Each method passes on to [`StorageLayer::inner`]
        /// unless the wrapper overrides it. Each implementor is a [`Storage`].
        ///
        /// A read-only view of another storage implements [`Storage`] itself: what it leaves out
        /// is then refused and not passed on.
        ///
        /// Implement it by its path (`impl vdkit_block::StorageLayer for ...`). An import of both
        /// traits would make each call of a method ambiguous.
        pub trait StorageLayer: Send + Sync + fmt::Debug {
            /// The wrapper must see every byte that moves. Capabilities of the inner storage would
            /// pass it by, so callers get none that the wrapper does not implement itself, and use
            /// the core methods.
            const INTERCEPTS: bool;

            /// The storage beneath.
            fn inner(&self) -> &dyn Storage;
            $(
                #[doc = concat!("See [`Storage::", stringify!($method), "`].")]
                fn $method(&self $(, $argument: $type)*) -> $returns {
                    self.inner().$method($($argument),*)
                }
            )*
            $(
                #[doc = concat!("See [`Storage::", stringify!($query), "`].")]
                fn $query(&self) -> $capability {
                    if Self::INTERCEPTS { None } else { self.inner().$query() }
                }
            )*
        }

        #[deny(clippy::missing_trait_methods)]
        impl<L: StorageLayer> Storage for L {
            $(
                fn $method(&self $(, $argument: $type)*) -> $returns {
                    StorageLayer::$method(self $(, $argument)*)
                }
            )*
            $(
                fn $query(&self) -> $capability {
                    StorageLayer::$query(self)
                }
            )*
        }
    };
}

layer! {
    core {
        fn name(&self) -> &str;
        fn caps(&self) -> StorageCaps;
        fn len(&self) -> Result<u64>;
        fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize>;
        fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()>;
        fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()>;
        fn discard(&self, offset: HostOffset, len: u64) -> Result<()>;
        fn allocate(&self, offset: HostOffset, len: u64) -> Result<()>;
        fn set_len(&self, len: u64) -> Result<()>;
        fn sync(&self) -> Result<()>;
        fn space_map(&self) -> Option<&dyn SpaceMap>;
    }
    capabilities {
        fn as_fd(&self) -> Option<BorrowedFd<'_>>;
        fn read_paths(&self) -> Option<&dyn ReadPaths>;
        fn initial_writes(&self) -> Option<&dyn InitialWrites>;
        fn guest_discard(&self) -> Option<&dyn GuestDiscard>;
        fn kernel_copy(&self) -> Option<&dyn KernelCopy>;
        fn access_exchange(&self) -> Option<&dyn AccessExchange>;
    }
}
