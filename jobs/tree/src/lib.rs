//! Which images refer to which: the tree of backing files in folders, and the images that depend on one.

mod dependents;
mod tree;

pub use dependents::{Dependents, dependents, refuse_dependents};
pub use tree::{
    ReferenceStatus, TreeBacking, TreeFault, TreeImage, TreeOptions, TreeReport, describe,
    target_of, tree,
};
