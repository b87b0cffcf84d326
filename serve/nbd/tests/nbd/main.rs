//! The server against our own client: every style of reply, every request, valid and invalid.

mod commit;
mod corpus;
mod departed;
mod durable;
mod handshake;
mod large;
mod load;
mod nospace;
mod requests;
