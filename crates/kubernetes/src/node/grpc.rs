//! gRPC at Unix sockets: methods by their paths.
use prost::Message;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::UnixListener;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

pub type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;
pub type HttpRequest = http::Request<Body>;
pub type HttpResponse = http::Response<Body>;

/// A service: it answers a method, or gives the request back as unknown.
pub trait Methods: Send + Sync + 'static {
    fn call(self: Arc<Self>, path: String, request: HttpRequest) -> Boxed<HttpResponse>;
}

struct Unary<F>(F);

impl<F, R, Q, A> UnaryService<Q> for Unary<F>
where
    F: FnMut(Q) -> R,
    R: Future<Output = Result<A, Status>> + Send + 'static,
{
    type Response = A;
    type Future = Boxed<Result<Response<A>, Status>>;

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let answer = (self.0)(request.into_inner());
        Box::pin(async move { answer.await.map(Response::new) })
    }
}

/// Answers a call by a function of its message.
pub async fn unary<Q, A, R>(request: HttpRequest, answer: impl FnMut(Q) -> R) -> HttpResponse
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    R: Future<Output = Result<A, Status>> + Send + 'static,
{
    Grpc::new(ProstCodec::<A, Q>::default()).unary(Unary(answer), request).await
}

struct Stream<A>(Option<ReceiverStream<Result<A, Status>>>);

impl<Q, A: Send + 'static> ServerStreamingService<Q> for Stream<A> {
    type Response = A;
    type ResponseStream = ReceiverStream<Result<A, Status>>;
    type Future = Boxed<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, _: Request<Q>) -> Self::Future {
        let stream = self.0.take().ok_or_else(|| Status::internal("a stream is asked for twice"));
        Box::pin(async move { stream.map(Response::new) })
    }
}

/// Answers a call by a stream, whatever its message says.
pub async fn stream<Q, A>(request: HttpRequest, answers: ReceiverStream<Result<A, Status>>) -> HttpResponse
where
    Q: Message + Default + 'static,
    A: Message + 'static,
{
    Grpc::new(ProstCodec::<A, Q>::default()).server_streaming(Stream::<A>(Some(answers)), request).await
}

/// A method that the service has not.
pub fn unknown(path: &str) -> HttpResponse {
    Status::unimplemented(format!("no method {path}")).into_http()
}

struct Service<M>(Arc<M>);

impl<M> Clone for Service<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: Methods> tower_service::Service<HttpRequest> for Service<M> {
    type Response = HttpResponse;
    type Error = Infallible;
    type Future = Boxed<Result<HttpResponse, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest) -> Self::Future {
        let answer = self.0.clone().call(request.uri().path().to_string(), request);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// Serves until the listener fails.
///
/// # Errors
/// It does.
pub async fn serve<M: Methods>(listener: UnixListener, methods: Arc<M>) -> Result<(), tonic::transport::Error> {
    Server::builder().serve_with_incoming(Service(methods), UnixListenerStream::new(listener)).await
}

/// A call of somebody's at a Unix socket.
///
/// # Errors
/// The other end's, or that it is not there.
pub async fn call<Q, A>(socket: &std::path::Path, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let failed = |error: tonic::transport::Error| Status::unavailable(format!("{}: {error}", socket.display()));
    let channel: Channel =
        Endpoint::from_shared(format!("unix:{}", socket.display())).map_err(failed)?.connect().await.map_err(failed)?;
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.map_err(failed)?;
    let path = http::uri::PathAndQuery::from_static(path);
    let answer = grpc.unary(Request::new(message), path, ProstCodec::<Q, A>::default()).await?;
    Ok(answer.into_inner())
}
