//! The server against a driver of our own: what guests do, what hostile guests do, and what is
//! left when either side goes away.

mod guest;
mod hostile;
mod life;
mod nospace;
mod recovery;
mod requests;
mod rig;
