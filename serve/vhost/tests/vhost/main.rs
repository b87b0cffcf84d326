//! The server against our own driver: normal guests, hostile guests, and disconnects of either
//! side.

mod guest;
mod hostile;
mod life;
mod nospace;
mod recovery;
mod requests;
mod rig;
